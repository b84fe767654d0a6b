"""One CPU thread per test process: tiny tensors gain nothing from more, and busy machines lose a lot.

Triton reads TRITON_INTERPRET when it is first imported, whichever test does that: set it for all.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config, items):
    """What shares a fixture stays in one process of pytest-xdist: a file, all that asks the SGLang server.

    Each chaos test starts what it kills, so those are dealt out one by one.
    """
    if not hasattr(config, "workerinput"):  # no process of pytest-xdist
        return
    asking = {item.path for item in items if "sglang_server" in getattr(item, "fixturenames", ())}
    for item in items:
        if item.path.parent.name != "chaos":
            item.add_marker(pytest.mark.xdist_group("sglang" if item.path in asking else str(item.path)))


@pytest.fixture
def no_leftovers():
    """A test that fails with a trainer open must not fail the next one."""
    from rlpipe.trainer import runtime

    yield
    if torch.distributed.is_initialized():
        runtime.stop()


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory):
    """The shipped model behind a real SGLang server, rejection sampling, three drafts; one for all tests."""
    from tests.helpers.cli import ROOT
    from tests.helpers.sglang import running_server

    with running_server(ROOT / "models" / "tiny", tmp_path_factory.mktemp("sglang")) as engine:
        yield engine


@pytest.fixture
def sglang(sglang_server):
    """The shared server, serving version 0 of the shipped weights again afterwards."""
    from rlpipe.hf_layout import read_weights
    from tests.helpers.cli import ROOT
    from tests.helpers.sglang import repaired

    yield sglang_server
    repaired(sglang_server)
    sglang_server.resume()
    sglang_server.events.clear()
    shipped = read_weights(ROOT / "models" / "tiny")
    if sglang_server.stats().policy_version or not sglang_server.check_weights(shipped).passed:
        sglang_server.update_weights(shipped, 0)
