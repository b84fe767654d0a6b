"""Names of the objectives that can train a draft: the files of `rlpipe.drafts.objectives`. No torch."""

from __future__ import annotations

from pathlib import Path

from rlpipe.config.choice import Choice

_FILES = Path(__file__).parents[1] / "drafts" / "objectives"


def _names(folder: str) -> list[str]:
    return sorted(file.stem for file in (_FILES / folder).glob("[a-z]*.py"))


MtpObjective = Choice(
    "MtpObjective",
    {name.upper(): name for folder in ("supervised", "windows") for name in _names(folder)},
    module=__name__,
)
"""What a draft is trained to minimise; each is defined in the file of its name."""
SUPERVISED = [MtpObjective(name) for name in _names("supervised")]  # learn from given text


class AnchorWeighting(Choice):
    """How much each anchor (place where a verify step may start) counts."""

    UNIFORM = "uniform"  # every anchor alike
    VISIT = "visit"  # by the probability that a verify step starts there
