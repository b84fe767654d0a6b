"""Every metric is declared once, and the reference page says what the code says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rlpipe.metrics import names
from rlpipe.metrics.distributions import SKETCH_PARTS
from rlpipe.metrics.names import Kind, Metric, declare, declared, metrics, reference_page
from rlpipe.metrics.values import Last, Mean, Ratio, Sum

pytestmark = pytest.mark.unit


def test_no_name_is_declared_twice() -> None:
    counts = Counter(metric.name for metric in metrics())
    assert [name for name, n in counts.items() if n > 1] == []


def test_every_declaration_is_complete() -> None:
    for metric in metrics():
        assert metric.unit and metric.source and metric.produced_by
        assert metric.definition.endswith("."), metric.name


@pytest.mark.parametrize(
    ("name", "declaration"),
    [
        ("actor/entropy", "actor/entropy"),
        ("spec/acceptance_rate/depth_12", "spec/acceptance_rate/depth_{k}"),
        ("rollout_corr/chi2_token", "rollout_corr/{name}"),
        ("val/new-families/reward_se", "val/{split}/reward_se"),
        ("env/sandbox/memo_hit_rate", "env/sandbox/memo_hit_rate"),
    ],
)
def test_a_name_finds_its_declaration(name: str, declaration: str) -> None:
    assert declared(name).name == declaration


@pytest.mark.parametrize(
    "name",
    [
        "actor/grad_nrom",
        "timing_s/udpate_actor",
        "spec/acceptance_rate/depth_x",
        "rollout_corr/a/b",
        "val//reward",
        "xactor/entropy",
        "",
    ],
)
def test_an_undeclared_name_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ValueError, match=r"not declared.*catalogue\.toml"):
        declared(name)


def test_kinds_accept_exactly_the_types_that_reduce_that_way() -> None:
    assert Kind.AVERAGE.accepts(Mean(1, 1)) and Kind.AVERAGE.accepts(Ratio(1, 1))
    assert not Kind.AVERAGE.accepts(Sum(1)) and not Kind.SUM.accepts(Last(1))


def test_an_extension_declares_its_own_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_extensions", [])
    own = Metric(
        name="my_env/score", kind=Kind.AVERAGE, unit="1", definition="Ours.", source="ours", produced_by="me"
    )
    declare(own)
    declare(own)
    try:
        assert declared("my_env/score") is own
        with pytest.raises(ValueError, match="already declared"):
            declare(
                Metric(name="actor/lr", kind=Kind.SUM, unit="1", definition="", source="", produced_by="")
            )
    finally:
        declared.cache_clear()
        names._index.cache_clear()


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert page.read_text() == reference_page(), "python -m rlpipe.metrics.names > docs/metrics.md"


def test_the_reference_page_lists_every_name() -> None:
    page = reference_page()
    assert [m.name for m in metrics() if f"| `{m.name}`" not in page] == []
    assert ", ".join(f"`name/{part}`" for part in SKETCH_PARTS) in page
