"""Answers about the peak memory of trainers and checkpoints, measured and estimated."""

from __future__ import annotations

from typing import Any

from answers.tables import table


def trainer_memory(r: Any) -> str:
    """Tabulate peak memory and seconds of both arms for each part."""
    rows = []
    for row in r["rows"]:
        ours, baseline = ("parts", "masked") if row["part"] == "attention" else ("chunks", "logits")
        figures = [
            f"{row[arm][f]:,.{d}f}" for f, d in (("peak_mb", 0), ("seconds", 1)) for arm in (ours, baseline)
        ]
        rows.append([row["part"], f"{row['tokens']:,}", *figures])
    head = ["part", "tokens", "peak MB", "masked, or all logits", "seconds", "masked, or all logits"]
    return table(head, rows)


def context_parallel(r: Any) -> str:
    """Tabulate a rank's peak memory by the number of ranks, and its ratio to the peak of a single rank."""
    one = r["arms"][0]["peak_mb"]
    rows = [[arm["cp"], f"{arm['peak_mb']:,.0f}", f"{arm['peak_mb'] / one:.2f}"] for arm in r["arms"]]
    return table(["trainer.cp", "peak MB of a rank", "of one rank's"], rows) + (
        f"\n\nOf a step on one conversation of {r['tokens']:,} tokens, beyond weights, gradients and the "
        "optimizer. The norm of the gradient is the same within a millionth."
    )


def memory_estimate(r: Any) -> str:
    """Tabulate measured and estimated peaks."""
    every = [*r["rows"], *r["runs"]]
    rows = [[x["name"], x["measured"] >> 20, x["estimated"] >> 20, f"{x['ratio']:.3f}"] for x in every]
    said = "\n\nOn a CPU, beyond what libraries take; a model of 60M parameters or less."
    if r["runs"]:
        said += " The last row is a whole run of SmolLM2-135M-Instruct, libraries and checkpoint included."
    return table(["process", "measured peak, MiB", "estimated", "ratio"], rows) + said


def checkpoint_peaks(r: Any) -> str:
    """Compare the host memory of saving and resuming with the estimate."""
    rows = [
        [x["name"], x["save"] >> 20, x["estimated"] >> 20, f"{x['ratio']:.3f}", x["resume"] >> 20]
        for x in r["rows"]
    ]
    head = ["ranks", "saving adds, MiB", "estimated", "ratio", "resuming adds, MiB"]
    off = max(x["norm_error"] for x in r["rows"])
    within = f" within {off:.0e}" if off else ""
    return table(head, rows) + (
        "\n\nOf the rank that needs the most, on gloo ranks with the distributed optimizer; a model of 60M "
        f"parameters. The gradient norm of the step after resuming is the same{within}."
    )
