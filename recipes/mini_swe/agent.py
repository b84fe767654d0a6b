"""Runs mini-swe-agent's loop on one task, with its `DefaultAgent`, `LocalEnvironment` and parser of actions.

This program runs in the sandbox, in the folder of the repository. It changes only the text between loop and
model: the shipped toy model writes a bare command and reads the command's output.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

os.environ["MSWEA_SILENT_STARTUP"] = "1"
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.utils.actions_text import (
    format_observation_messages,
    parse_regex_actions,
)

TURNS = 8
SHOWN = 400  # characters of a command's output
ACTION = r"\A(.*)\Z"  # everything that the model writes
OBSERVATION = f"{{{{ output.output.rstrip('\\n')[:{SHOWN}] }}}}"


class Endpoint:
    """A `Model` of mini-swe-agent that sends requests to the address that rlpipe gives an agent."""

    def query(self, messages: list[dict], **_: object) -> dict:
        """Have the model write the next turn; its actions are in `extra`."""
        # The toy model was never taught a system message. Empty messages stay: an observation may be empty.
        told = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "system"]
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        request = urllib.request.Request(url, json.dumps({"messages": told}).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            content = json.load(answer)["choices"][0]["message"]["content"] or ""
        actions = parse_regex_actions(content, action_regex=ACTION, format_error_template="{{ error }}")
        return {"role": "assistant", "content": content, "extra": {"actions": actions}}

    def format_message(self, **message: object) -> dict:
        """Return a message."""
        return message

    def format_observation_messages(self, message: dict, outputs: list[dict], variables: dict) -> list[dict]:
        """Return the results of commands as messages for the model."""
        return format_observation_messages(outputs, observation_template=OBSERVATION, template_vars=variables)

    def get_template_vars(self, **_: object) -> dict:
        """Return no variables: the templates here need none."""
        return {}

    def serialize(self) -> dict:
        """Return an empty record, because rlpipe records the conversation."""
        return {}


def main() -> None:
    """Work on the task; without a submission there is no answer, as in mini-swe-agent's own runs."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    environment = LocalEnvironment(timeout=10, env={"PATH": f"/agent:{os.environ['PATH']}"})
    agent = DefaultAgent(
        Endpoint(), environment, system_template="", instance_template="{{ task }}", step_limit=TURNS
    )
    task = json.loads(Path(os.environ["RLPIPE_TASK"]).read_text())
    status = agent.run(task["prompt"])["exit_status"]
    if status != "Submitted":
        for path, content in before.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    print(status)


if __name__ == "__main__":
    main()
