"""The drafters (`spec.drafter`), with the properties on which settings and weights depend.

Owns names and data only. The functions of a drafter (guess, trainer, checks) are in `rlpipe.drafts.kinds`;
its model in the embedded engine is a row of `rlpipe.rollout.embedded.drafters`. Imports no torch.
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
    """Names of the weights of a draft model in an SGLang server, which the canary compares."""

    prefix: str
    """Prefix of the names of the draft's weights if they are sent together with the target's."""

    tables: Callable[[Family, HfConfig], Iterable[tuple[str, str, Iterable[Part]]]]
    """Function of the target's family and config.json. Returns rows of three entries: prefix of a module on
    the draft's server, its prefix in the draft's checkpoint, and the module's weights."""

    shared: tuple[Part, ...] = ()
    """Tensors of the target that the draft has too."""

    fixed: tuple[str, ...] = ()
    """Names of tensors that a server reads only when it starts; they are never sent."""


@dataclass(slots=True, kw_only=True, frozen=True)
class DrafterKind:
    """Properties of one drafter."""

    title: str
    """Name in reports and on the console."""

    has_model: bool = True
    """Whether a model generates the drafts; otherwise they are looked up in the text."""

    has_directory: bool = False
    """Whether the draft model has a separate directory (`spec.draft_path`) and trainer; otherwise it is the
    checkpoint's MTP layer, which the policy's trainer trains."""

    reads_head: bool = False
    """Whether it drafts with the target's head; `spec.draft_vocab` can then select rows of this head."""

    sglang: str = ""
    """Value of SGLang's `--speculative-algorithm`; empty if SGLang cannot draft in this way."""

    served: ServedDraft | None = None
    """Names of its weights in an SGLang server; None if they are not compared."""


class Drafter(Choice):
    """The source of the draft tokens of a chain; verification does not depend on it."""

    MTP = "mtp"  # the checkpoint's MTP layer
    EAGLE3 = "eagle3"  # an EAGLE-3 draft model from spec.draft_path
    SUFFIX = "suffix"  # the tokens that followed when the text last ended in the same way

    @property
    def kind(self) -> DrafterKind:
        """The properties of this drafter."""
        return KINDS[self]


# Weights of an EAGLE-3 draft model, except its head and its decoder layer.
_EAGLE3_WEIGHTS = (
    Part((), ("fc.weight",)),
    Part((), ("norm.weight",)),
    Part((), ("midlayer.hidden_norm.weight",), served="layers.0.hidden_norm.weight"),
)

KINDS: dict[Drafter, DrafterKind] = {
    Drafter.MTP: DrafterKind(
        title="MTP draft",
        reads_head=True,
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
