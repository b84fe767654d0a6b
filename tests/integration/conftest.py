"""One SGLang server for all tests of this folder that ask for it."""

import pytest

from rlpipe.hf_layout import read_weights
from tests.helpers.cli import ROOT
from tests.helpers.sglang import repaired, running_server

TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory):
    """The shipped model behind a real server, rejection sampling, three drafts."""
    with running_server(TINY, tmp_path_factory.mktemp("sglang")) as engine:
        yield engine


@pytest.fixture
def sglang(sglang_server):
    """The shared server, serving version 0 of the shipped weights again afterwards."""
    yield sglang_server
    repaired(sglang_server)
    sglang_server.resume()
    sglang_server.events.clear()
    if sglang_server.stats().policy_version:
        sglang_server.update_weights(read_weights(TINY), 0)
