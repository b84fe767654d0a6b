"""The drafters: each has a file and a row in `DRAFTERS`. Imports no torch."""

from __future__ import annotations

from rlpipe.config.drafters import Drafter
from rlpipe.drafts.kinds import eagle3, mtp, suffix
from rlpipe.drafts.kinds.base import DrafterFunctions

DRAFTERS: dict[Drafter, DrafterFunctions] = {
    Drafter.MTP: mtp.DRAFTER,
    Drafter.EAGLE3: eagle3.DRAFTER,
    Drafter.SUFFIX: suffix.DRAFTER,
}
