"""One CPU thread per test process: tiny tensors gain nothing from more, and busy machines lose a lot.

Triton reads TRITON_INTERPRET when it is first imported, whichever test does that: set it for all.
"""

import json
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
SECONDS = Path(__file__).with_name("seconds.json")  # of the files that take long, with nothing else running
LONG = 10.0


def pytest_addoption(parser):
    parser.addoption("--write-seconds", action="store_true", help=f"write {SECONDS.name} anew after the run")


def pytest_configure(config):
    """The process that hands out the tests adds up their seconds; so does one that runs alone."""
    if config.getoption("--write-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Seconds())


def pytest_collection_modifyitems(items):
    """Sort short files in their order, then the long ones, the longest first.

    Processes are given file after file. Were a long one among the last, the others would wait for its end.
    """
    seconds = json.loads(SECONDS.read_text())
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), float("inf")))


def _file(nodeid):
    return nodeid.partition("::")[0]


class Seconds:
    """Seconds of the files that ran, fixtures included; those of other files stay as they were."""

    def __init__(self):
        self.spent = Counter()

    def pytest_runtest_logreport(self, report):
        self.spent[_file(report.nodeid)] += report.duration

    def pytest_sessionfinish(self):
        known = json.loads(SECONDS.read_text()) | self.spent
        long = {file: round(seconds) for file, seconds in known.items() if seconds >= LONG}
        in_order = sorted(long.items(), key=lambda one: -one[1])
        SECONDS.write_text(json.dumps(dict(in_order), indent=2) + "\n")


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
