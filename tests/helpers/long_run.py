"""A run directory as a long run leaves it: records, rollouts token by token, events, a trace."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from rlpipe.metrics.bus import STEP
from rlpipe.metrics.trace import NAME, TraceFile

T0 = 1_700_000_000.0
WORDS = (
    "def",
    " fix",
    "(",
    "value",
    ")",
    ":",
    "\n",
    "    return",
    " x",
    " +",
    " 1",
    "`",
    "<b>",
    "é",
    " 日本",
)


def make_long_run(
    directory: Path, *, steps: int = 1000, per_step: int = 4, tokens: int = 160, seed: int = 0
) -> Path:
    """Write `steps` steps with `per_step` recorded trajectories each, of about `tokens` tokens."""
    random_ = random.Random(seed)
    (directory / "rollouts").mkdir(parents=True)
    entropy = 1.0
    records: list[dict[str, Any]] = [{STEP: 0, "time": T0 + 5, "val/reward": 0.3, "val/reward_se": 0.03}]
    for step in range(1, steps + 1):
        entropy += random_.gauss(0, 0.01)
        records.append(_record(step, entropy, random_))
        lines = [_trajectory(step, n, tokens, entropy, random_) for n in range(per_step)]
        file = directory / "rollouts" / f"step_{step:06d}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [
        {"time": T0, "kind": "start", "level": "info", "recipe": "swe_rl"},
        {"time": T0 + 5 + 10 * steps, "kind": "end", "level": "info", "outcome": "done"},
    ]
    for name, items in (("metrics.jsonl", records), ("events.jsonl", events)):
        (directory / name).write_text("".join(json.dumps(item) + "\n" for item in items))
    (directory / "config.yaml").write_text(
        f"recipe: swe_rl\nrun:\n  steps: {steps}\nspec:\n  mode: rejection\n  gamma: 3\n"
    )
    trace = TraceFile(directory / NAME)
    trace.open()
    for step in range(min(steps, 20)):
        begin = T0 + 10 * step
        trace.spans(
            [
                ("controller", 0, "wait", begin, begin + 4, {}),
                ("trainer 0", 0, "train", begin + 4, begin + 9, {}),
            ]
        )
    trace.close()
    return directory


def _record(step: int, entropy: float, random_: random.Random) -> dict[str, Any]:
    rate = 0.8 - 0.2 * entropy + random_.gauss(0, 0.01)
    record = {
        STEP: step,
        "time": T0 + 5 + 10 * step,
        "critic/rewards/mean": min(1.0, 0.3 + 0.5 * step / 1000 + random_.gauss(0, 0.05)),
        "rollout/entropy": entropy,
        "spec/acceptance_rate": rate,
        "spec/acceptance_length": 1 + 3 * rate,
        "training/rollout_probs_diff_mean": 0.0025 * (step % 10) / 10,  # long labels
        "timing_s/step": 10.0,
        "timing_s/wait_rollout": 4.0,
        "timing_s/update_actor": 5.0,
        "perf/throughput": 900 + 50 * random_.random(),
        "perf/utilisation/rollout": 0.9,
        "perf/utilisation/trainer": 0.5,
    }
    record |= {f"spec/acceptance_rate/depth_{k}": rate - 0.05 * k for k in (1, 2, 3)}
    record |= {f"rollout_corr/extra_{n}": random_.random() for n in range(60)}
    if step % 50 == 0:
        record |= {"val/reward": 0.3 + 0.4 * step / 1000, "val/reward_se": 0.03}
    return record


def _trajectory(step: int, n: int, tokens: int, entropy: float, random_: random.Random) -> dict[str, Any]:
    """One line of rollouts/step_N.jsonl: a prompt of 12 tokens, two turns, a tool between them."""
    prompt, tool = 12, 10
    first = tokens // 2
    spans = [(0, prompt), (prompt, prompt + first), (prompt + first, prompt + first + tool)]
    spans.append((spans[-1][1], spans[-1][1] + tokens - first))
    length = spans[-1][1]
    sampled = [spans[1][0] <= i < spans[1][1] or i >= spans[3][0] for i in range(length)]
    accepted, drafts = [-1] * length, []
    for begin, end in (spans[1], spans[3]):
        at, accepted[begin] = begin + 1, 0
        while at < end:
            kept = min(random_.choice((0, 1, 2, 3)), end - at)
            p, q = [round(random_.random(), 4) for _ in range(3)], [0.9] * 3
            drafts.append([at, kept, [random_.randrange(1000) for _ in range(3)], p, q])
            accepted[at : min(end, at + kept + 1)] = [*range(1, kept + 1), 0][: end - at]
            at += kept + 1
    texts = [random_.choice(WORDS) for _ in range(length)]
    roles = ("user", "assistant", "tool", "assistant")
    return {
        "step": step,
        "trajectory_id": f"g{step}/{n}",
        "group_id": f"g{step}",
        "prompt_id": f"task-{n}",
        "status": "complete",
        "reward": float(random_.random() < 0.5),
        "trainer_version": step - 1,
        "policy_versions": [[-1, prompt], [step - 1, first], [-1, tool], [step, tokens - first]],
        "prompt_length": prompt,
        "tokens": [random_.randrange(1000) for _ in range(length)],
        "token_texts": texts,
        "rollout_logprobs": [round(-random_.expovariate(1 / entropy), 4) if s else 0 for s in sampled],
        "entropies": [round(random_.expovariate(1 / entropy), 4) if s else 0 for s in sampled],
        "accepted": accepted,
        "drafts": drafts,
        "spec": {"drafted": [9, 6, 3], "accepted": [6, 3, 2], "verify_steps": 9, "proposed": 27},
        "turns": [
            {"role": role, "text": "".join(texts[a:b])[:2000], "span": [a, b]}
            for role, (a, b) in zip(roles, spans, strict=True)
        ],
        "info": {"exit_reason": "done"},
    } | ({} if n else {"siblings": [0.0, None, 0.5]})
