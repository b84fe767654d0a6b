"""The trajectories of the report's viewer: their selection, and the rows that the page displays.

Reads rollouts/step_N.jsonl (docs/run_directory.md) up to a limit, or trajectories.jsonl if a run recorded no
tokens; the page colours the tokens. Flow: files spread evenly over the run -> rows -> the page.

A row is {run, step, instance_id, group, reward, siblings, status, turns}. The last turn may be by the
verifier: it has the details of the grading in `info`. `siblings` are the rewards of the group's other
attempts; if the record has none, the rewards of the group's other rows are used.

A turn is {role, text}. If the model wrote it and tokens were recorded, a turn is {role, tokens, e, p, a, v}:

    tokens   texts of the tokens
    e, p     entropies and -logprobs in 1/100 nat
    a        depth at which a token was accepted as a draft (0: sampled by the target); absent without drafts
    v        [[policy version, number of tokens], ...]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.metrics.runs import RunData

MAX_TRAJECTORY_BYTES = 14_000_000  # maximum JSON of all runs in the page, before compression
MAX_READ_BYTES = 100_000_000  # maximum to read from the rollout files of a run
MAX_TURN_CHARS = 6_000
MAX_TURN_TOKENS = 4_000
SHOWN_ELSEWHERE = ("turns", "token_texts", "exit_reason", "tamper", "retries", "sandbox_seconds", "submitted")


def shown_trajectories(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return trajectories spread evenly over each run, as many as fit into MAX_TRAJECTORY_BYTES."""
    shown = []
    for run in runs:
        name = run.name if len(runs) > 1 else ""
        rows = [_row(t, name) for t in _recorded(run) if isinstance(t.get("turns"), list) and t["turns"]]

        # Every run gets the same share of MAX_TRAJECTORY_BYTES.
        stride = max(1.0, sum(map(_size, rows)) / (MAX_TRAJECTORY_BYTES / len(runs)))
        shown += [rows[int(n * stride)] for n in range(int(len(rows) / stride))]

    return shown


def _recorded(run: RunData) -> Iterator[dict[str, Any]]:
    """Yield rollouts with tokens from files spread evenly over the run, or else trajectories.jsonl."""
    files = sorted((run.path / "rollouts").glob("step_*.jsonl"))
    if not files:
        yield from run.trajectories
        return

    stride = max(1.0, sum(file.stat().st_size for file in files) / MAX_READ_BYTES)
    for n in range(int(len(files) / stride) or 1):
        yield from read_jsonl(files[int(n * stride)])[0]


def _row(trajectory: dict[str, Any], run: str) -> dict[str, Any]:
    """Return the row of a trajectory for the page's script; see the module docstring."""
    reward = trajectory.get("reward")
    row = {
        "run": run,
        "step": trajectory.get("step"),
        "instance_id": str(trajectory.get("prompt_id", trajectory.get("instance_id", ""))),
        "reward": reward if isinstance(reward, (int, float)) else None,
        "turns": [
            turn for raw in trajectory["turns"] if isinstance(raw, dict) for turn in _turns(raw, trajectory)
        ],
    }

    # Omit optional fields that are empty.
    if trajectory.get("status", "complete") != "complete":
        row["status"] = str(trajectory["status"])
    if reason := (trajectory.get("info") or {}).get("exit_reason"):
        row["exit"] = str(reason)
    if tamper := (trajectory.get("info") or {}).get("tamper"):
        row["tamper"] = str(tamper)
    if siblings := trajectory.get("siblings"):
        row["siblings"] = siblings
    if group := trajectory.get("group_id"):
        row["group"] = str(group)

    info = trajectory.get("info") or {}
    grading = {k: v for k, v in info.items() if k not in SHOWN_ELSEWHERE and v != ""}
    if grading:
        text = "\n".join(f"{name}: {value}" for name, value in grading.items())
        row["turns"].append({"role": "verifier", "text": _cut(text)})

    return row


def _turns(turn: dict[str, Any], trajectory: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the turns of a record: one for {role, text, span}, two for {action, observation}."""
    if "action" in turn:
        yield {"role": "assistant", "text": _cut(str(turn["action"]))}
        if turn.get("observation"):
            yield {"role": "tool", "text": _cut(str(turn["observation"]))}
    elif turn.get("role") == "assistant" and turn.get("span") and trajectory.get("token_texts"):
        yield {"role": "assistant", **_tokens(trajectory, *turn["span"])}
    else:
        yield {"role": str(turn.get("role", "")), "text": _cut(str(turn.get("text", "")))}


def _tokens(trajectory: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Return the sampled tokens of a turn with the values of each token; keys as in the module docstring."""
    end = min(end, begin + MAX_TURN_TOKENS)
    versions = [v for v, count in trajectory["policy_versions"] for _ in range(count)][begin:end]

    turn = {
        "tokens": trajectory["token_texts"][begin:end],
        "e": [round(100 * h) for h in trajectory["entropies"][begin:end]],
        "p": [round(-100 * logprob) for logprob in trajectory["rollout_logprobs"][begin:end]],
        "v": [[version, len(list(same))] for version, same in groupby(versions)],
    }

    # Without speculation every token is the target's, and to colour them all alike would say nothing.
    if trajectory.get("drafts"):
        turn["a"] = trajectory["accepted"][begin:end]

    return turn


def _cut(text: str) -> str:
    excess = len(text) - MAX_TURN_CHARS
    return text if excess <= 0 else f"{text[:MAX_TURN_CHARS]}\n… {excess} characters left out"


def _size(row: dict[str, Any]) -> int:
    return len(json.dumps(row))


def viewer_html(trajectories: Sequence[dict[str, Any]]) -> str:
    """Return the HTML of an empty viewer, which the page's script fills; "" without trajectories."""
    if not trajectories:
        return ""

    runs = list(dict.fromkeys(t["run"] for t in trajectories))
    steps = sorted({t["step"] for t in trajectories if isinstance(t["step"], int)})

    # Offer only colourings whose data was recorded.
    colours = [("", "no colour")]
    turns = [turn for t in trajectories for turn in t["turns"] if "tokens" in turn]
    if any("a" in turn for turn in turns):
        colours.append(("accepted", "colour: acceptance"))
    if turns:
        colours += [
            ("entropy", "colour: entropy"),
            ("logprob", "colour: surprise"),
            ("version", "colour: version"),
        ]

    outcomes = [("", "any reward"), ("solved", "reward 1 or more"), ("not", "less")]
    return (
        '<h2 id="trajectories">Trajectories</h2><div class="viewer" id="viewer"><div class="bar">'
        + (_select("v-run", "run", [("", "all runs"), *((r, r) for r in runs)]) if len(runs) > 1 else "")
        + _select("v-step", "step", [("", "all steps"), *((str(s), f"step {s}") for s in steps)])
        + _select("v-outcome", "outcome", outcomes)
        + (_select("v-colour", "colour", colours) if turns else "")
        + '<span class="grow"></span><span class="pair"><button id="v-prev">← previous</button> '
        '<button id="v-next">next →</button></span></div><div class="note" id="v-where"></div>'
        '<div class="legend" id="v-legend"></div><div id="v-turns"></div>'
        '<div class="about" id="v-token" role="status"></div></div>'
    )


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<option value="{escape(v)}">{escape(text)}</option>' for v, text in options)
    return f'<select id="{name}" aria-label="{label}">{items}</select>'
