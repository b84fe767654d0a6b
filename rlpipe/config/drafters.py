"""What may draft (`spec.drafter`), and what settings and weights need to know of each drafter.

Owns names and data only. The functions of a drafter (guess, trainer, checks) are `rlpipe.drafts.kinds`; the
model that drafts in the embedded engine is a row of `rlpipe.rollout.embedded.drafters`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.config.choice import Choice
from rlpipe.config.eagle3 import PREFIX as EAGLE3_PREFIX
from rlpipe.models.base import DENSE_LAYER, EMBEDDING, HEAD, Family, Part
from rlpipe.models.checkpoint import MTP_PREFIX

HfConfig = Mapping[str, Any]
"""Contents of a model's `config.json`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ServedDraft:
    """Where an SGLang server keeps the weights of a draft model, as the canary compares them."""

    prefix: str
    """Prefix of the names of its weights when they travel with the target's."""

    tables: Callable[[Family, HfConfig], Iterable[tuple[str, str, Iterable[Part]]]]
    """(family and config.json of the target) -> rows of three: prefix of a module on the draft's server, its
    prefix in the draft's checkpoint, the module's weights."""

    shared: tuple[Part, ...] = ()
    """Tensors of the target that the draft holds too."""

    fixed: tuple[str, ...] = ()
    """Names of tensors that a server reads when it starts; they are never sent."""


@dataclass(slots=True, kw_only=True, frozen=True)
class DrafterKind:
    """Properties of one drafter."""

    title: str
    """Name in reports and on the console."""

    has_model: bool = True
    """Whether a model drafts; otherwise drafts are looked up in the text."""

    has_directory: bool = False
    """Whether that model has its own directory (`spec.draft_path`) and trainer; otherwise it is the
    checkpoint's MTP layer, which the policy's trainer trains."""

    sglang: str = ""
    """Value of SGLang's `--speculative-algorithm`; empty where SGLang cannot draft this way."""

    served: ServedDraft | None = None
    """Where an SGLang server keeps its weights."""


class Drafter(Choice):
    """What proposes the drafts of a chain; verification does not depend on it."""

    MTP = "mtp"  # the checkpoint's MTP layer
    EAGLE3 = "eagle3"  # an EAGLE-3 draft model from spec.draft_path
    SUFFIX = "suffix"  # whatever followed the last time the text ended like this

    @property
    def kind(self) -> DrafterKind:
        """Its properties."""
        return KINDS[self]


_EAGLE3_WEIGHTS = (  # of a draft, besides its head and its decoder layer
    Part((), ("fc.weight",)),
    Part((), ("norm.weight",)),
    Part((), ("midlayer.hidden_norm.weight",), served="layers.0.hidden_norm.weight"),
)

KINDS: dict[Drafter, DrafterKind] = {
    Drafter.MTP: DrafterKind(
        title="MTP draft",
        sglang="NEXTN",
        served=ServedDraft(
            prefix=MTP_PREFIX,
            tables=lambda family, config: (
                (family.draft_place, "", family.draft),
                (f"model.{family.draft_block}.", "", family.layer_parts(config)),
            ),
            shared=(EMBEDDING, HEAD),
        ),
    ),
    Drafter.EAGLE3: DrafterKind(
        title="EAGLE-3 draft",
        has_directory=True,
        sglang="EAGLE3",
        served=ServedDraft(
            prefix=EAGLE3_PREFIX,
            tables=lambda family, config: (
                ("", "", (HEAD,)),
                ("model.", "", _EAGLE3_WEIGHTS),
                ("model.layers.0.", "midlayer.", DENSE_LAYER),
            ),
            shared=(EMBEDDING,),
            fixed=("d2t", "t2d", "embed_tokens.weight"),
        ),
    ),
    Drafter.SUFFIX: DrafterKind(title="suffix lookup", has_model=False),
}
