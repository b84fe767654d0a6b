"""The protocol with the model, over a workspace that is scripted."""

import pytest

from rlpipe.config.env import ActionMode, EnvConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox.base import CommandResult, Limit
from rlpipe.envs.swe.episode import SweEpisode, parse_action, shorten
from rlpipe.envs.swe.instances import Instance
from rlpipe.envs.swe.workspace import Grade

pytestmark = pytest.mark.unit
INSTANCE = Instance(
    instance_id="i",
    problem_statement="f is broken",
    fail_to_pass=("t.T.a",),
    metadata={"family": "sum", "line": 2},
)


class ScriptedWorkspace:
    def __init__(self, result=None, grade=None, error=None):
        self.result = result or CommandResult(output="out\n", exit_code=0)
        self.final, self.error = grade, error
        self.commands, self.closed = [], False

    def run(self, command):
        self.commands.append(command)
        if self.error:
            raise self.error
        return self.result

    def grade(self):
        return self.final

    def close(self):
        self.closed = True


def episode(workspace, **settings):
    return SweEpisode(INSTANCE, workspace, EnvConfig(**settings))


def fenced(workspace, **settings):
    return episode(workspace, action_mode=ActionMode.FENCED, **settings)


def test_plain_mode_opens_with_the_statement_alone_and_takes_the_whole_text_as_command():
    workspace = ScriptedWorkspace()
    plain = episode(workspace)
    assert plain.messages() == [{"role": "user", "content": "f is broken"}]
    assert plain.step("grep -n '' core.py\nls").observation == "out"
    assert workspace.commands == ["grep -n '' core.py\nls"]


def test_fenced_mode_opens_with_the_protocol_and_takes_the_one_block():
    workspace = ScriptedWorkspace(CommandResult(output="no\n", exit_code=2))
    one = fenced(workspace)
    system, user = one.messages()
    assert system["role"] == "system" and "```bash\nsubmit\n```" in system["content"]
    assert user == {"role": "user", "content": "f is broken"}
    answer = one.step("I look.\n```bash\ncat <<'E'\nx\nE\n```\nThen I fix it.").observation
    assert workspace.commands == ["cat <<'E'\nx\nE"]
    assert answer == "<returncode>2</returncode>\n<output>\nno\n</output>"
    assert fenced(workspace, system_prompt="mine").messages()[0]["content"] == "mine"


@pytest.mark.parametrize(
    ("text", "found"), [("ls", 0), ("```bash\nls\n```\n```bash\nls\n```", 2), ("```python\nx\n```", 0)]
)
def test_a_turn_without_exactly_one_block_runs_nothing_and_is_told(text, found):
    workspace = ScriptedWorkspace(grade=Grade(changed=True, passed=1, required=1))
    one = fenced(workspace)
    step = one.step(text)
    assert workspace.commands == [] and not step.done
    assert "exactly one" in step.observation and f"found {found}" in step.observation
    assert one.step("```bash\nsubmit\n```").info["format_errors"] == 1


@pytest.mark.parametrize(
    ("grade", "reward"),
    [
        (Grade(changed=True, passed=2, required=2), 1.0),
        (Grade(changed=True, passed=1, required=2), 0.0),
        (Grade(changed=False, passed=2, required=2), 0.0),
    ],
)
def test_reward_needs_a_change_and_every_required_test(grade, reward):
    step = episode(ScriptedWorkspace(grade=grade)).step(" submit\n")
    assert step.done and step.reward == reward
    assert step.info["submitted"] and step.info["family"] == "sum" and "line" not in step.info
    assert (step.info["tests_passed"], step.info["tests_required"]) == (grade.passed, grade.required)


def test_without_a_submission_there_is_no_reward_however_good_the_files_are():
    workspace = ScriptedWorkspace(grade=Grade(changed=True, passed=1, required=1))
    step = episode(workspace).finish()
    assert step.done and step.reward == 0.0 and step.info["submitted"] is False


def test_only_a_bare_submit_submits():
    workspace = ScriptedWorkspace()
    assert not episode(workspace).step("submit now").done
    assert not episode(workspace).step("echo submit").done
    assert workspace.commands == ["submit now", "echo submit"]


def test_a_limit_is_told_and_long_output_is_shortened():
    timeout = ScriptedWorkspace(CommandResult(output="", exit_code=137, exceeded=Limit.TIME))
    assert episode(timeout).step("sleep 99").observation == "timeout"
    chatty = ScriptedWorkspace(CommandResult(output="a" * 50 + "z" * 50, exit_code=0))
    seen = episode(chatty, max_observation_chars=20).step("yes").observation
    assert seen == "a" * 10 + "\n[80 characters left out]\n" + "z" * 10


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_shortening_keeps_exactly_the_limit_of_characters(limit):
    kept = shorten("abcdefgh", limit).split(f"\n[{8 - limit} characters left out]\n")
    assert len("".join(kept)) == limit and "abcdefgh".startswith(kept[0]) and "abcdefgh".endswith(kept[1])


def test_bytes_no_shell_takes_are_removed_and_endless_commands_are_refused():
    assert parse_action("a\0b\ud800", ActionMode.PLAIN) == ("ab?", 1)
    workspace = ScriptedWorkspace()
    assert episode(workspace).step("x" * 200_000).observation == "command too long"
    assert workspace.commands == []


def test_a_sandbox_failure_is_raised_not_rewarded():
    with pytest.raises(InfrastructureError):
        episode(ScriptedWorkspace(error=InfrastructureError("gone"))).step("ls")


def test_closing_frees_the_workspace():
    workspace = ScriptedWorkspace()
    episode(workspace).close()
    assert workspace.closed
