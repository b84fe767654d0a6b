"""Check that every declared metric and event is emitted somewhere, and that every emitted one is declared.

    python scripts/check_catalogue.py

This is a linter of rlpipe/metrics/catalogue.toml, which reads the source as ruff does. A name counts as
emitted if it occurs in the source as a key or value of a dict, as the target of an assignment, or as an
argument of `stats`; a replacement field of an f-string matches a placeholder of the declaration. Names that
are composed of parts, and verl's names, come from a call of the function that composes them. Modules that
only read metrics do not count. If only one side has some names, they are printed and the exit status is 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from rlpipe.adapt.estimates import ExpectedCounts, PromptCounts
from rlpipe.adapt.evaluation import DomainEvaluation, Evaluation, ModeCounts
from rlpipe.algo.correction import make_rule
from rlpipe.algo.policy_loss import LossInputs, LossTotals, finish, micro_batch_loss
from rlpipe.algo.rule import TokenExtras
from rlpipe.config.algo import AlgoConfig, Correction, ObrsConfig, ObrsNormalizer
from rlpipe.diagnosis.probe import COLUMNS, ProbeTable, table_metrics
from rlpipe.drafts.loss.stats import no_stats
from rlpipe.metrics.collect import spec_metrics, validation_metrics
from rlpipe.metrics.names import EVENTS, declared, metrics
from rlpipe.metrics.spans import SpanLog
from rlpipe.types import SpecCounts

ROOT = Path(__file__).resolve().parents[1]
READERS = ("rlpipe/report", "rlpipe/diagnosis", "rlpipe/config", "rlpipe/metrics/names.py")
# Within the readers' folders.
EMITTERS = ("rlpipe/diagnosis/probe.py", "rlpipe/diagnosis/acceptance_split.py")
HOLE = "{}"


def sources(without: tuple[str, ...]) -> Iterator[ast.AST]:
    """Yield the syntax nodes of every module of the library and the recipes, except modules in `without`."""
    for file in chain(*((ROOT / top).rglob("*.py") for top in ("rlpipe", "recipes"))):
        path = file.relative_to(ROOT).as_posix()
        if path in EMITTERS or not path.startswith(without):
            yield from ast.walk(ast.parse(file.read_text()))


def text(node: ast.AST | None) -> str | None:
    """Return a string literal, with HOLE in place of each field that an f-string or `str.format` fills in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return shape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None


def shape(name: str) -> str:
    """Return a declared name with HOLE for its placeholders."""
    return re.sub(r"\{\w+\}", HOLE, name)


def called(node: ast.Call) -> str:
    """Return the name of the called function or method."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def spelled(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of metrics that these nodes emit."""
    names = set()
    for node in nodes:
        match node:
            case ast.Dict():
                names |= {*map(text, node.keys), *map(text, node.values)}
            case ast.DictComp():
                names.add(text(node.key))
            case ast.Subscript(ctx=ast.Store()):
                names.add(text(node.slice))
            case ast.Call() if called(node) == "stats" and node.args and text(node.args[0]):
                names |= {f"{text(node.args[0])}/{part}" for part in ("mean", "max", "min")}
    return names - {None}


def raised(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the kinds of events that these nodes raise, by calls of `event` and the like or a condition."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Call) and called(node).endswith(("event", "_lost")):
            names |= {text(argument) for argument in node.args[:2]}
        elif isinstance(node, ast.IfExp):
            names |= {text(node.body), text(node.orelse)} & EVENTS.keys()
    return names - {None}


def composed() -> set[str]:
    """Return the names that functions compose of parts, by calling them so that they emit all of them."""
    mask = torch.ones(1, 3)
    law = torch.full((3, 2), 0.5).log()
    config = AlgoConfig(
        kl_coef=0.1, correction=Correction.OBRS, obrs=ObrsConfig(normalizer=ObrsNormalizer.EXACT)
    )
    inputs = LossInputs(
        logprobs=-mask,
        entropies=mask,
        old_logprobs=-mask,
        rollout_logprobs=-mask,
        advantages=mask,
        mask=mask,
        reference_logprobs=-mask,
    )
    _, loss = micro_batch_loss(
        inputs,
        LossTotals(tokens=3, sequences=1, dp_size=1),
        config,
        rule=make_rule(config),
        extras=TokenExtras(columns={"uniforms": torch.zeros(3)}, rollout_top=law, target_top=law),
    )
    counts = SpecCounts(drafted=[1], accepted=[1], verify_steps=1, proposed=1)
    prompts = {"a": PromptCounts(spec=counts, emitted=2)}
    played = ModeCounts(counts=prompts, tokens=2, seconds=1.0)
    expected = {"a": ExpectedCounts(drafted=[1.0], accepted=[0.5], verify_steps=1.0, emitted=1.5)}
    domain = DomainEvaluation(
        in_domain=True, expected={"rejection": expected}, overlap=[0.5], by_mode={"rejection": played}
    )
    table = ProbeTable(
        trajectory_id="t",
        positions=np.zeros(1, int),
        values=dict.fromkeys(COLUMNS, np.ones((1, 1))),
    )
    return set(
        chain(
            finish(loss),
            no_stats(1, torch.device("cpu")).metrics(),
            Evaluation(step=0, gamma=1, temperature=1.0, domains={"held": domain}).metrics(),
            table_metrics([table], "probe/fixed"),
            spec_metrics(counts),
            SpanLog("trainer 0").drain(),
            validation_metrics("held", [], primary=True),
        )
    )


def never_emitted(names: Iterable[str], shapes: set[str], composed_names: set[str]) -> list[str]:
    """Return the declared names that neither occur in the source nor are composed by a function."""
    return [name for name in names if shape(name) not in shapes and name not in composed_names]


def may_be(spelled: str, declared: str) -> bool:
    """Return whether the holes of both names can be filled to make them equal, segment by segment."""
    pairs = list(zip(spelled.split("/"), declared.split("/"), strict=False))
    holes = [[re.escape(x).replace(r"\{\}", r"[^/]+") for x in pair] for pair in pairs]
    return spelled.count("/") == declared.count("/") and all(
        re.fullmatch(a, y) or re.fullmatch(b, x) for (x, y), (a, b) in zip(pairs, holes, strict=True)
    )


def undeclared(shapes: Iterable[str]) -> list[str]:
    """Return names in the source without a declaration, if some declaration has the same first segment."""
    known = [shape(metric.name) for metric in metrics()]
    spaces = {name.partition("/")[0] for name in known if "/" in name}
    named = (s for s in shapes if re.fullmatch(r"[\w{}.]+(/[\w{}.]+)+", s) and s.partition("/")[0] in spaces)
    return sorted(name for name in named if not any(may_be(name, other) for other in known))


def main() -> int:
    """Print every name that only one side has; return 1 if there is any."""
    shapes = spelled(sources(READERS))
    composed_names = {declared(name).name for name in composed()}
    events = raised(sources(("rlpipe/report",)))
    faults = {
        "declared, never emitted": never_emitted((m.name for m in metrics()), shapes, composed_names),
        "emitted, not declared": undeclared(shapes),
        "events declared, never raised": sorted(EVENTS.keys() - events),
        "events raised, not declared": sorted(events - EVENTS.keys()),
    }
    for fault, names in faults.items():
        for name in names:
            print(f"{fault}: {name}")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
