"""One CPU thread per test process: tiny tensors gain nothing from more, and busy machines lose a lot.

Triton reads TRITON_INTERPRET when it is first imported, whichever test does that: set it for all.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
