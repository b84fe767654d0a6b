"""Does drafting pay? Compares the acceptance needed for a speed-up on this machine with the run's acceptance.

Let c be the time of a step with gamma drafts divided by the time of a step without drafts. Drafting is faster
if the number of tokens per verify step exceeds c. The step times are `spec/step_seconds/...`, measured when
the engine started. The number of tokens per step is 1 + a_1 + a_1 a_2 + ..., where a_k is the acceptance at
depth k in the run's last steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlpipe.diagnosis.step_times import step_seconds
from rlpipe.metrics.runs import RunData
from rlpipe.report.details import table
from rlpipe.spec.gamma import break_even_acceptance

LAST_STEPS = 20  # number of last steps over which acceptance is averaged
EVEN = 0.02  # a smaller gain or loss is reported as even


@dataclass(slots=True, kw_only=True, frozen=True)
class Pay:
    """Whether drafting gamma tokens pays at a batch size.

    cost: time of a step relative to a step without drafts. needed: acceptance, equal at every depth, at which
    drafting breaks even; None if drafting is slower even when all drafts are accepted. tokens: tokens per
    verify step at the run's acceptance. measured: acceptance, equal at every depth, that gives this number of
    tokens.
    """

    batch: int
    gamma: int
    cost: float
    needed: float | None
    tokens: float
    measured: float

    @property
    def gain(self) -> float:
        """Return the speed relative to decoding without drafts."""
        return self.tokens / self.cost

    @property
    def outcome(self) -> str:
        """Return the outcome as a word."""
        if abs(self.gain - 1) < EVEN:
            return "even"
        return "pays" if self.gain > 1 else "does not pay"


def pays(costs: Mapping[tuple[int, int], float], rates: list[float]) -> list[Pay]:
    """Compare step times with acceptance, for every batch size and every gamma up to the number of rates.

    Args:
        costs: seconds of a step by (batch size, gamma), including gamma 0 for every batch size.
        rates: acceptance at depth 1, 2, ..., given that the previous depth was accepted.

    >>> [row] = pays({(1, 0): 10.0, (1, 1): 12.0}, [0.5])
    >>> row.needed, row.gain, row.outcome
    (0.2, 1.25, 'pays')
    """
    rows, needed = [], break_even_acceptance(costs)
    for batch, gamma in sorted(needed):
        if gamma > len(rates):
            continue

        tokens, reach = 1.0, 1.0
        for rate in rates[:gamma]:
            reach *= rate
            tokens += reach
        cost = costs[batch, gamma] / costs[batch, 0]
        measured = break_even_acceptance({(batch, 0): 1.0, (batch, gamma): tokens})[batch, gamma]
        rows.append(
            Pay(
                batch=batch,
                gamma=gamma,
                cost=cost,
                needed=needed[batch, gamma],
                tokens=tokens,
                measured=1.0 if measured is None else measured,
            )
        )
    return rows


def run_pays(run: RunData) -> list[Pay]:
    """Return the comparisons for a run; [] if it has no step times or no drafts."""
    costs = step_seconds(run.records)
    rates: list[float] = []
    while values := run.series(f"spec/acceptance_rate/depth_{len(rates) + 1}")[1]:
        last = values[-LAST_STEPS:]
        rates.append(sum(last) / len(last))
    return pays(costs, rates) if costs and rates else []


def pays_table(run: RunData) -> str:
    """Return the comparisons for a run as an HTML table; "" if there are none."""
    rows = run_pays(run)
    if not rows:
        return ""

    cells = [
        [
            str(row.batch),
            str(row.gamma),
            f"{row.cost:.2f}",
            "never" if row.needed is None else f"{row.needed:.2f}",
            f"{row.measured:.2f}",
            f"{row.tokens:.2f}",
            f"{row.gain:.2f}",
            {"pays": '<span class="good">pays</span>', "even": "even"}.get(
                row.outcome, f'<span class="bad">{row.outcome}</span>'
            ),
        ]
        for row in rows
    ]
    titles = [
        "rows",
        "gamma",
        "cost of a step",
        "acceptance needed",
        "measured",
        "tokens a step",
        "speed",
        "",
    ]
    note = (
        "Step times are of this machine when the engine started, relative to a step without drafts. Needed: "
        "acceptance at every depth at which drafts neither gain nor lose. Measured: of the last "
        f"{LAST_STEPS} steps, as one rate for all depths. Speed is tokens over cost, of decoding only."
    )
    return (
        '<h2 id="pays">Does drafting pay here?</h2>'
        f'<p class="sub">{note}</p>{table(titles, cells, numeric=range(7))}'
    )
