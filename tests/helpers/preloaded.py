"""What most processes of `in_a_process` and `run_ranks` need, imported once by the server that forks them."""

import gc

import numpy  # noqa: F401
import pytest  # noqa: F401
import reasoning_gym  # noqa: F401
import tokenizers  # noqa: F401
import torch  # noqa: F401

import tests.helpers.dying_cluster
import tests.helpers.gradients  # noqa: F401
from rlpipe.algo import verl_door

verl_door.core_algos()
gc.freeze()
