"""One CPU thread per test process: tiny tensors gain nothing from more, and busy machines lose a lot.

Triton reads TRITON_INTERPRET when it is first imported, whichever test does that: set it for all.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def no_run_lives_on():
    """A test that fails with a run alive must not take a core from the next one."""
    from tests.helpers.cli import end_started

    yield
    end_started()


@pytest.fixture
def no_leftovers():
    """A test that fails with a trainer open must not fail the next one."""
    from rlpipe.trainer import runtime

    yield
    if torch.distributed.is_initialized():
        runtime.stop()


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory):
    """The shipped model behind a real SGLang server, rejection sampling, three drafts; one for a process."""
    from tests.helpers.cli import ROOT
    from tests.helpers.sglang import running_server

    with running_server(ROOT / "models" / "tiny", tmp_path_factory.mktemp("sglang")) as engine:
        yield engine


@pytest.fixture
def sglang(sglang_server):
    """The shared server, serving version 0 of the shipped weights again afterwards."""
    from rlpipe.models.checkpoint import read_weights
    from tests.helpers.cli import ROOT
    from tests.helpers.sglang import repaired

    yield sglang_server
    repaired(sglang_server)
    sglang_server.resume()
    sglang_server.events.clear()
    shipped = read_weights(ROOT / "models" / "tiny")
    if sglang_server.stats().policy_version or not sglang_server.check_weights(shipped).passed:
        sglang_server.update_weights(shipped, 0)
