"""What most processes of `in_a_process` and `run_ranks` need, imported once by the server that forks them."""

# ruff: noqa: F401
import gc

import numpy
import pytest
import reasoning_gym
import tokenizers
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import rlpipe.actors.inline_cluster
import rlpipe.algo.user_correction
import rlpipe.cli.check
import rlpipe.cli.doctor
import rlpipe.cli.run
import rlpipe.envs.sandbox.local
import rlpipe.envs.swe.suite
import rlpipe.launch
import rlpipe.preflight.checkpoint_and_machine
import tests.helpers.dying_cluster
import tests.helpers.gradients
from rlpipe.algo import verl_door

verl_door.core_algos()
gc.freeze()
