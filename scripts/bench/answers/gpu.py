"""Answers that were measured on a GPU."""

from __future__ import annotations

from statistics import mean
from typing import Any

from answers.tables import table


def gpu_decoding(r: Any) -> str:
    """Report the speed of SGLang on a GPU."""
    cells = r["results"]["sglang, 7.8B, bf16, gamma 3, 200 tokens"]
    rows = [
        [batch, cell["none"]]
        + [
            f"{cell[mode]} ({cell[mode] / cell['none']:.2f} times, length {cell['acceptance_length'][mode]})"
            for mode in ("target_only", "rejection")
        ]
        for batch, cell in cells.items()
    ]
    return table(["batch", "none, tokens/s", "target_only", "rejection"], rows) + (
        "\n\n7.8B parameters grown from the shipped model, bf16, gamma 3, 200 tokens."
    )


def gpu_decoding_in_brief(r: Any) -> str:
    """Report the speed of SGLang with drafts over no drafts, at the smallest and the largest batch."""
    cells = r["results"]["sglang, 7.8B, bf16, gamma 3, 200 tokens"]
    first, *_, last = ((batch, cell["rejection"] / cell["none"]) for batch, cell in cells.items())
    return ", ".join(f"{ratio:.2f}x at batch {batch}" for batch, ratio in (first, last))


def gpu_loop(r: Any) -> str:
    """Report how the time of a step is spent on a GPU."""
    arms = r["results"]["whole loop, 1.5B, one shared GPU"]
    rows = [
        [arm]
        + [" and ".join(map(str, v[key])) for key in ("generation_s", "update_weights_s", "step_s")]
        + [f"{v['tokens_per_s']:,}"]
        for arm, v in arms.items()
    ]
    ratio = _generation_ratio(r)
    return table(["", "generation, s", "weight update, s", "step, s", "tokens/s"], rows) + (
        f"\n\nTwo steps each, 1.5B parameters, server and trainer on one GPU, weights by disk. Without "
        f"drafts generation takes {ratio:.2f} times as long. Not repeated since."
    )


def gpu_loop_in_brief(r: Any) -> str:
    """Report how much longer the generation phase takes without drafts."""
    return f"{_generation_ratio(r):.2f}x"


def _generation_ratio(r: Any) -> float:
    arms = r["results"]["whole loop, 1.5B, one shared GPU"]
    return mean(arms["none"]["generation_s"]) / mean(arms["rejection"]["generation_s"])


def gpu_verify(r: Any) -> str:
    """Report the time of the verification kernel on a GPU."""
    rows = r["results"]["verification, V = 151936, chain, us"]

    def text(value: Any) -> str:
        return f"{value[0]} to {value[1]}" if isinstance(value, list) else str(value)

    ours, theirs = rows["ours, in a CUDA graph"], rows["sglang, in a CUDA graph"]
    return table(
        ["batch", "rlpipe, microseconds", "SGLang's"], ([b, text(ours[b]), text(theirs[b])] for b in ours)
    ) + (
        "\n\nIn a CUDA graph. The embedded engine verifies by these kernels on a GPU, servers by others. "
        "Called from Python rlpipe's takes "
        f"{text(rows['ours, called from Python'])} and SGLang's {text(rows['sglang, called from Python'])}."
    )
