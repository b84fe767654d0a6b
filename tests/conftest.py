"""One CPU thread per test process: tiny tensors gain nothing from more, and busy machines lose a lot."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
