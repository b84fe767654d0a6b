"""What only GPU servers do: overlapped steps, captured graphs, several ranks. SGLang's classes are driven."""

import json
import os
import re
import subprocess

import pytest

from rlpipe.config.sglang import SglangConfig
from rlpipe.rollout.sglang.environment import find_environment
from tests.helpers.cli import ROOT
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def driven():
    """The results of all cases: importing SGLang takes longer than they do."""
    needs_sglang()
    python = find_environment(SglangConfig(), on_gpu=False).python
    variables = {"PYTHONPATH": str(ROOT / "sglang_env" / "plugin"), "SGLANG_USE_CPU_ENGINE": "1"}
    variables |= {
        "TORCHDYNAMO_DISABLE": "1"
    }  # as for servers on a CPU: compiling takes longer than the cases
    script = ROOT / "tests" / "helpers" / "overlapping_scheduler.py"
    done = subprocess.run(
        [str(python), "-P", str(script)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_tokens_of_the_step_in_flight_keep_the_version_that_made_them(driven):
    found = driven["versions"]
    assert found["made_by"] == ["1"] * 6 + ["2"] * 3
    assert found["spans"] == [["1", 0, 6], ["2", 6, 9]]


def test_the_overlapping_loop_goes_on_after_an_update_and_takes_each_result_once(driven):
    found = driven["loop"]
    assert found["launched"] == [0, 1, 2, 3, 4, 5]
    assert found["processed"] == [0, 1, 2, 3, 4], "the last one is in flight when the loop ends"
    assert found["waiting"] == [0, 1, 1, 1, 1, 1], "one step overlaps the next throughout"
    assert found["spans"] == [["1", 0, 9], ["2", 9, 15]]
    assert found["made_by"] == ["1"] * 9 + ["2"] * 6


def test_a_request_whose_result_was_taken_early_is_not_left_out_of_the_next_step(driven):
    """SGLang leaves out requests that the step in flight will finish; that step's tokens are known here."""
    assert driven["loop"]["finishing"] == [0, 1, 1, 0, 1, 1]


def test_ranks_that_agree_serve(driven):
    assert driven["compared"]["none"] == [["ok", 2, 1]] * 2


@pytest.mark.parametrize(
    ("fault", "reported"),
    [("hook", "rank 1: SGLang could not hook: .*fast_sample"), ("kernels", "rank 1: ok, drafting by torch")],
)
def test_ranks_that_would_draft_differently_do_not_serve(driven, fault, reported):
    for message, compared, served in driven["compared"][fault]:
        assert re.search(rf"would draft differently \(rank 0: ok, drafting by kernels; {reported}", message)
        assert (compared, served) == (0, 0)


def test_captured_steps_of_all_sizes_keep_their_drafts_in_one_buffer(driven):
    """Sizes 1, 2, 3, 5 and 8, gamma 3, 11 tokens in float32: 2,508 bytes where each keeps its own."""
    found = driven["graphs"]
    assert found["kept"] == 8 * 3 * 11 * 4
    assert found["right"] == [True] * 5
    assert found["eager_in_graphs"] == 0
