"""Fixtures of the integration tests."""

import pytest
import torch

from rlpipe.trainer import runtime


@pytest.fixture
def no_leftovers():
    """A test that fails with a trainer open must not fail the next one."""
    yield
    if torch.distributed.is_initialized():
        runtime.stop()
