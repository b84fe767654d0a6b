"""Settings that make no sense are refused with what, the value and the remedy."""

import subprocess
import sys

import pytest

from rlpipe.config.env import EnvConfig, ReasoningConfig, SandboxConfig

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SandboxConfig(processes=0), ["env.sandbox.processes", "0", "limit"]),
        (lambda: SandboxConfig(timeout_s=-1.0), ["env.sandbox.timeout_s", "-1.0"]),
        (lambda: EnvConfig(max_turns=0), ["env.max_turns", "0"]),
        (lambda: EnvConfig(retries=-1), ["env.retries", "-1"]),
        (lambda: EnvConfig(held_out_files=[]), ["env.held_out_files", "no file"]),
        (lambda: EnvConfig(held_out_files=["a/h.jsonl", "b/h.jsonl"]), ["env.held_out_files", "rename"]),
        (lambda: EnvConfig(held_out_files=["x/train.jsonl"]), ["env.held_out_files", "env.train_file"]),
        (lambda: EnvConfig(test_command="pytest"), ["env.test_command", "{runner}", "python {runner}'"]),
        (lambda: ReasoningConfig(tasks=[]), ["env.reasoning.tasks", "empty"]),
        (lambda: ReasoningConfig(held_out_size=0), ["held_out_size=0"]),
        (lambda: ReasoningConfig(train_size=2_000_000), ["train_size=2000000", "at most 1000000"]),
    ],
)
def test_a_bad_value_is_named_with_its_setting(make, words):
    with pytest.raises(ValueError) as refused:
        make()
    assert all(word in str(refused.value) for word in words), refused.value


def test_environment_configuration_imports_no_heavy_library():
    code = (
        "import sys, rlpipe.config.env, rlpipe.envs; "
        "print([m for m in ('torch', 'minisweagent', 'reasoning_gym', 'omegaconf') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
