"""How much is lost if drafter, training and objective are chosen by measurements made elsewhere?

    python -m recipes.smollm_adapt.choices [--out recipes/smollm_adapt/results]

Reads only committed results and takes seconds. A unit is a held-out set or a policy, for which the value of
every option is known. The regret of a choice is the share of the best option's value that is lost.

    drafter    recipes/drafters: two domains at temperatures 0 and 1; the value is the speed relative to no
               drafts. "measured here" chooses by the other temperature of the same domain, "measured
               elsewhere" by the other domain.
    training   tokens per step of the draft as it starts and after hard CE, soft KL and end-to-end TV:
               SmolLM2 in and out of domain (`objectives`), its policies after RL (`replay`), and the tiny
               model, in and out of domain (recipes/mtp_adapt). "measured elsewhere" chooses by the mean
               regret over the other units.
    ten steps  all objectives of `objectives`: the choice is the one with the largest mean acceptance in its
               first ten steps, on texts that it was not trained on; its regret is measured at the end.

Training time is ignored. Every interval is over the units of its question (Student's, 95%). Rule and
gamma are chosen in `advice`. Writes choices.json and the picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.runs import rounded_over_seeds, seeds_to_decide

RECIPES = Path(__file__).resolve().parents[1]
HERE = "measured here"
ELSEWHERE = "measured elsewhere"
Units = Mapping[str, Mapping[str, float]]  # value of every option, by unit
Choose = Callable[[Units, str], str]


def result(*parts: str) -> Any:
    """Read a committed result of a recipe."""
    return json.loads(RECIPES.joinpath(*parts).read_text())


def drafter_units(drafters: Any) -> dict[str, dict[str, float]]:
    """Return each drafter's speed over no drafts, by domain and temperature; learned ones use e2e TV."""
    pairs = [("MTP layer", "mtp/e2e_tv"), ("EAGLE-3", "eagle3/e2e_tv"), ("suffix lookup", "suffix")]
    return {
        name: {option: cell["arms"][arm]["speed against none"] for option, arm in pairs} | {"none": 1.0}
        for name, cell in drafters["cells"].items()
    }


def training_units(objectives: Any, replay: Any, tiny: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return tokens per step of a draft as it starts and after each objective, by held-out set or policy.

    tiny: results of mtp_adapt by the name of the training domain.
    """
    names = {"hard CE": "hard_ce", "soft KL": "kl", "e2e TV": "e2e_tv"}
    units = {}
    for held_out in ("in domain", "out of domain"):
        table = objectives["table"]
        trained = {option: table[arm][f"{held_out}, rejection"]["mean"][0] for option, arm in names.items()}
        start = objectives["start"][held_out]["rejection"]
        units[f"SmolLM2, {held_out}"] = _lengths({"no training": start} | trained)

    arms = {"no training": "frozen", "hard CE": "online hard CE", "soft KL": "online soft CE"}
    arms |= {"e2e TV": "online e2e TV"}
    for run in range(replay["runs"]):
        ends = {option: replay["ends"][arm][run] for option, arm in arms.items()}
        units[f"SmolLM2, after RL, run {run}"] = _lengths(ends)

    rows = {"no training": "warm-up"} | {option: f"{arm}/uniform" for option, arm in names.items()}
    for domain, one in tiny.items():
        for held_out in one["table"]["warm-up"]:
            units[f"tiny, {domain}, on {held_out}"] = {
                option: one["table"][row][held_out]["rejection"]["tokens_per_step"][0]
                for option, row in rows.items()
            }
    return units


def _lengths(accepted: Mapping[str, float]) -> dict[str, float]:
    return {option: 1 + value for option, value in accepted.items()}


def lost(values: Mapping[str, float], option: str) -> float:
    """Return the share of the best option's value that an option loses."""
    return 1 - values[option] / max(values.values())


def best_elsewhere(units: Units, unit: str) -> str:
    """Return the option with the smallest mean regret over the other units."""
    others = [values for name, values in units.items() if name != unit]
    return min(units[unit], key=lambda option: np.mean([lost(values, option) for values in others]))


def of_other_temperature(units: Units, unit: str) -> str:
    """Return the best option of the same domain at its other temperature."""
    (other,) = [name for name in units if name != unit and _domain(name) == _domain(unit)]
    return max(units[other], key=units[other].__getitem__)


def of_other_domain(units: Units, unit: str) -> str:
    """Return the option with the smallest mean regret in the other domain."""
    others = {name: values for name, values in units.items() if _domain(name) != _domain(unit)}
    return best_elsewhere(others | {unit: units[unit]}, unit)


def _domain(unit: str) -> str:
    return unit.split(",")[0]


def regrets(units: Units, ways: Mapping[str, Choose], base: str) -> dict[str, Any]:
    """Return the share lost by every way of choosing, and by each fixed option: units, mean, interval."""
    fixed = next(iter(units.values()))
    by_way = {
        way: {unit: lost(units[unit], choose(units, unit)) for unit in units} for way, choose in ways.items()
    }
    by_way |= {option: {unit: lost(units[unit], option) for unit in units} for option in fixed}
    rows: dict[str, Any] = {}
    for way, by_unit in by_way.items():
        rows[way] = {
            "lost": rounded_over_seeds(by_unit.values()),
            "units": {unit: round(value, 4) for unit, value in by_unit.items()},
        }
        if way != base:
            gaps = [by_unit[unit] - by_way[base][unit] for unit in units]
            rows[way] |= {f"minus {base}": rounded_over_seeds(gaps)}
            rows[way] |= {f"seeds to decide, minus {base}": seeds_to_decide(gaps)}
    return {"base": base, "units": {unit: dict(values) for unit, values in units.items()}, "ways": rows}


def ten_steps(objectives: Any, steps: int = 10) -> dict[str, Any]:
    """Choose an objective by its first steps; return it and the share of tokens per step that is lost."""
    table = objectives["table"]
    early = {arm: float(np.mean(row["acceptance by step and depth"][:steps])) for arm, row in table.items()}
    chosen = max(early, key=early.__getitem__)
    ends = {
        held_out: _lengths({arm: row[f"{held_out}, rejection"]["mean"][0] for arm, row in table.items()})
        for held_out in ("in domain", "out of domain")
    }
    return {
        "chosen": chosen,
        "acceptance": {arm: round(value, 4) for arm, value in early.items()},
        "lost": {held_out: round(lost(values, chosen), 4) for held_out, values in ends.items()},
    }


def draw(results: Mapping[str, Any], file: Path) -> None:
    """Draw the share that every choice loses, with its interval and the value of each unit."""
    from matplotlib.figure import Figure

    from rlpipe.report.png import PALETTE, TEXT

    questions = results["questions"]
    figure = Figure(figsize=(10.4, 3.2), layout="constrained")
    for axis, (question, found) in zip(figure.subplots(1, len(questions)), questions.items(), strict=True):
        ways: Sequence[str] = list(reversed(found["ways"]))
        for number, way in enumerate(ways):
            row = found["ways"][way]
            values = [100 * value for value in row["units"].values()]
            axis.plot(values, [number] * len(values), "o", ms=3, color="0.7")
            value, low, high = (100 * x for x in row["lost"])
            error = [[value - low], [high - value]]
            axis.errorbar(value, number, xerr=error, fmt="o", ms=5, capsize=3, color=PALETTE[0])
        axis.set_yticks(range(len(ways)), ways)
        axis.set_title(question, color=TEXT, fontsize=11)
        axis.set_xlabel("% of the best option lost", color=TEXT)
        axis.axvline(0, color="0.6", lw=0.8)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(b=False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def compute() -> dict[str, Any]:
    """Compute the results from the committed ones."""
    objectives = result("smollm_adapt", "results", "objectives.json")
    replay = result("smollm_adapt", "results", "replay.json")
    tiny = {name: result("mtp_adapt", "results", f"{name}_t1.json") for name in ("swe", "reasoning")}
    drafters = drafter_units(result("drafters", "results.json"))
    training = training_units(objectives, replay, tiny)
    return {
        "questions": {
            "drafter": regrets(drafters, {HERE: of_other_temperature, ELSEWHERE: of_other_domain}, HERE),
            "training": regrets(training, {ELSEWHERE: best_elsewhere}, "e2e TV"),
        },
        "ten steps": ten_steps(objectives),
    }


def main() -> None:
    """Compute the results, write them, and draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RECIPES / "smollm_adapt" / "results")
    args = parser.parse_args()
    results = compute()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "choices.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out / "choices.svg")
    for question, found in results["questions"].items():
        print(question, {way: row["lost"] for way, row in found["ways"].items()})
    print(results["ten steps"])


if __name__ == "__main__":
    main()
