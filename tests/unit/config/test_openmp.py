"""Threads of torch spin for a short time while they wait, or not at all, unless the user chose otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlpipe.config.openmp import SHORT, is_contended, spin_briefly

pytestmark = pytest.mark.unit

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
UNCHOSEN = {name: value for name, value in os.environ.items() if name not in CHOICES}
ENTRIES = {
    "command": "from rlpipe.cli.main import main; main(['--version'])",
    "python API": "import rlpipe; rlpipe.Config",
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_of_the_user_stays(name):
    variables = {name: "7"}
    spin_briefly(variables)
    assert variables == {name: "7"}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_limit_is_set_before_torch_reads_it(entry):
    report = "import os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{ENTRIES[entry]}\n{report}"],
        env=UNCHOSEN,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout.splitlines()[-1] == f"{SHORT['GOMP_SPINCOUNT']} False"


def python(code, **variables):
    """Run code in a fresh interpreter, in which torch computes with two threads; return what it prints."""
    begin = """
import threading, time
from pathlib import Path
from rlpipe.config import openmp
openmp.spin_briefly()
import torch
def threads():
    return len(list(Path("/proc/self/task").iterdir()))
def compute():
    torch.zeros(1 << 20).exp_()
def until(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, threads()
        time.sleep(0.01)
torch.set_num_threads(2)
compute()
"""
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        env=UNCHOSEN | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_threads_that_are_released_end_and_come_back():
    code = """
before = threads()
openmp.release_threads()
until(lambda: threads() == before - 1)
compute()
assert threads() == before
print("done")
"""
    assert python(code) == ["done"]


def test_while_threads_compete_for_cores_there_are_more_of_them_than_cores():
    """Then the runtime lets them sleep at once. Four busy threads share one core."""
    code = """
import os
cores, quiet = len(os.sched_getaffinity(0)), threads() + 1
measured, openmp.is_contended = openmp.is_contended, lambda *_: True
openmp._INTERVAL_S = 0.5
openmp.watch_for_contention()
openmp.watch_for_contention()  # the second call starts nothing
until(lambda: threads() == quiet + cores)
openmp.is_contended = lambda *_: False
until(lambda: threads() == quiet)
openmp.is_contended = measured
stop = threading.Event()
def busy():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while not stop.is_set():
        torch.randn(300, 300) @ torch.randn(300, 300)
competing = [threading.Thread(target=busy) for _ in range(4)]
for thread in competing:
    thread.start()
until(lambda: threads() >= quiet + len(competing) + cores)
stop.set()
for thread in competing:
    thread.join()
openmp.is_contended = lambda *_: False  # other tests may run on the same cores
until(lambda: threads() == quiet)
print("done")
"""
    assert python(code) == ["done"]


@pytest.mark.parametrize("choice", [{"OMP_WAIT_POLICY": "PASSIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_nothing_is_watched_where_the_user_has_chosen(choice):
    code = "before = threads()\nopenmp.watch_for_contention()\nprint(threads() - before)"
    assert python(code, **choice) == ["0"]


def test_no_time_at_all_is_no_contention():
    assert not is_contended((1.0, 1.0), (1.0, 1.0)) and not is_contended((5.0, 3.0), (1.0, 1.0))
