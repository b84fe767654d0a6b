"""Every declared name is emitted somewhere, every emitted name is declared; events likewise.

A name is emitted where the source spells it: as a key or value of a dict, as the target of an assignment or
as an argument of `stats`; a hole of an f-string stands for a placeholder of the declaration. Names that are
put together of parts, and verl's, come from a call of what puts them together. Modules that only read metrics
do not count. The bus refuses undeclared metrics, so the other direction also holds in every run of the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import pytest
import torch

from rlpipe.adapt.estimates import PromptCounts
from rlpipe.adapt.evaluation import DomainEvaluation, Evaluation, PlayedCounts
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
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit

READERS = ("rlpipe/report", "rlpipe/watch", "rlpipe/config", "rlpipe/metrics/names.py")
HOLE = "{}"


def sources(without: tuple[str, ...]) -> Iterator[ast.AST]:
    for file in chain(*((ROOT / top).rglob("*.py") for top in ("rlpipe", "recipes"))):
        if not file.relative_to(ROOT).as_posix().startswith(without):
            yield from ast.walk(ast.parse(file.read_text()))


def text(node: ast.AST | None) -> str | None:
    """A string of the source, with HOLE for what an f-string or `str.format` fills in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return shape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None


def shape(name: str) -> str:
    return re.sub(r"\{\w+\}", HOLE, name)


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def spelled(nodes: Iterable[ast.AST]) -> set[str]:
    """Names of metrics that these nodes emit."""
    found = set()
    for node in nodes:
        match node:
            case ast.Dict():
                found |= {*map(text, node.keys), *map(text, node.values)}
            case ast.DictComp():
                found.add(text(node.key))
            case ast.Subscript(ctx=ast.Store()):
                found.add(text(node.slice))
            case ast.Call() if called(node) == "stats" and node.args and text(node.args[0]):
                found |= {f"{text(node.args[0])}/{part}" for part in ("mean", "max", "min")}
    return found - {None}


def raised(nodes: Iterable[ast.AST]) -> set[str]:
    """Kinds of events that these nodes raise: arguments of `event` and the like, or chosen by a condition."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Call) and called(node).endswith(("event", "_lost")):
            found |= {text(argument) for argument in node.args[:2]}
        elif isinstance(node, ast.IfExp):
            found |= {text(node.body), text(node.orelse)} & EVENTS.keys()
    return found - {None}


def put_together() -> set[str]:
    """Names that functions make of parts, of a case in which they emit all of them."""
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
    played = PlayedCounts(counts=prompts, tokens=2, seconds=1.0)
    domain = DomainEvaluation(in_domain=True, played={"rejection": played})
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


@pytest.fixture(scope="module")
def emitted() -> tuple[set[str], set[str]]:
    """Names that the source spells, shapes of them; declarations of those that are put together."""
    return spelled(sources(READERS)), {declared(name).name for name in put_together()}


def never_emitted(names: Iterable[str], emitted: tuple[set[str], set[str]]) -> list[str]:
    shapes, composed = emitted
    return [name for name in names if shape(name) not in shapes and name not in composed]


def test_every_declared_name_is_emitted(emitted: tuple[set[str], set[str]]) -> None:
    assert never_emitted((metric.name for metric in metrics()), emitted) == []


def test_a_name_that_nobody_emits_would_be_seen(emitted: tuple[set[str], set[str]]) -> None:
    planted = [
        "actor/phantom",
        "mtp/phantom/depth_{k}",
        "probe/{set}/phantom",
        "weights/{name}",
        "actor/loss",
    ]
    assert never_emitted(planted, emitted) == planted


def may_be(spelled: str, declared: str) -> bool:
    """Whether some filling of the holes of both makes them equal, segment by segment."""
    pairs = list(zip(spelled.split("/"), declared.split("/"), strict=False))
    holes = [[re.escape(x).replace(r"\{\}", r"[^/]+") for x in pair] for pair in pairs]
    return spelled.count("/") == declared.count("/") and all(
        re.fullmatch(a, y) or re.fullmatch(b, x) for (x, y), (a, b) in zip(pairs, holes, strict=True)
    )


def undeclared(shapes: Iterable[str]) -> list[str]:
    """Spelled names that no declaration covers, of those whose first segment some declaration has."""
    known = [shape(metric.name) for metric in metrics()]
    spaces = {name.partition("/")[0] for name in known if "/" in name}
    named = (s for s in shapes if re.fullmatch(r"[\w{}.]+(/[\w{}.]+)+", s) and s.partition("/")[0] in spaces)
    return sorted(name for name in named if not any(may_be(name, other) for other in known))


def test_every_name_that_the_source_spells_is_declared(emitted: tuple[set[str], set[str]]) -> None:
    assert undeclared(emitted[0]) == []


def test_a_name_that_nobody_declares_would_be_seen() -> None:
    planted = 'm["actor/new"] = {f"val/{split}/new": 1, f"mtp/{name}/depth_{k}": 2, "a text": 3, "a/path": 4}'
    assert undeclared(spelled(ast.walk(ast.parse(planted)))) == ["actor/new", "val/{}/new"]


def test_every_declared_event_is_raised_and_every_raised_event_declared() -> None:
    assert raised(sources(without=("rlpipe/report",))) == EVENTS.keys()
