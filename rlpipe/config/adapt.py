"""Settings of pre-RL adaptation: the training data of the draft, and the sets that measure its acceptance.

Owns the fields and their checks. `draft` has the objective, learning rate and gradient clip, and `run.steps`
is the number of steps. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.config.drafters import KINDS, Drafter
from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.config.limits import at_least, share
from rlpipe.config.spec import SpecMode

CHAINS = [SpecMode.REJECTION.value, SpecMode.TARGET_ONLY.value, SpecMode.BLOCK.value]


def _both() -> list[str]:
    """Return the verification rules that are evaluated by default."""
    return CHAINS[:2]


@dataclass(slots=True, kw_only=True)
class AdaptConfig:
    """Data and evaluation of pre-RL adaptation."""

    drafter: Drafter = Drafter.MTP
    """mtp, the checkpoint's MTP layer, or eagle3, a separate draft model (settings: `eagle3`)."""

    data: str = ""
    """JSONL file of conversations to train on; empty: the model's rollouts on the prompts of `env`."""

    rollouts: str = ""
    """File that stores the model's rollouts, so that none is sampled twice; empty: rollouts.jsonl in the run
    directory. Runs with the same backbone may share the file."""

    prompts: int = 512
    """Number of prompts for the model's rollouts."""

    samples: int = 4
    """Number of trajectories for each prompt."""

    batch: int = 32
    """Number of trajectories in an optimizer step."""

    warmup: float = 0.03
    """Share of the steps in which the learning rate rises linearly; afterwards it is constant (Bebop §6.1:
    0.03)."""

    context_weight: float = 0.0
    """Weight (0..1) of tokens that the model did not generate (prompt, tool output); generated tokens have
    weight 1. Engines draft only tokens that the model generates; with 0, the draft trains only on these.
    Other tokens bias hard labels, and are refused by objectives that are exact only for tokens of the
    model."""

    in_domain: list[str] = field(default_factory=list)
    """In-domain held-out sets. An entry is an environment (`swe`: all its held-out sets), one of its sets
    (`swe.held_families`), or a JSONL file of conversations (the model then generates their last assistant
    turns). Empty: the held-out sets of `env`."""

    out_of_domain: list[str] = field(default_factory=list)
    """Out-of-domain held-out sets, in the same form."""

    eval_modes: list[str] = field(default_factory=_both)
    """Verification rules with which the model generates in evaluations."""

    eval_every: int = 0
    """Steps between evaluations; 0: no evaluations between the first and the last one."""

    eval_first: bool = True
    """Evaluate before the first step."""

    eval_prompts: int = 80
    """Number of prompts of each held-out set, after the first `eval_offset`; 0: all. The model's answers to
    these prompts are sampled once, without drafts. Every evaluation computes how many tokens of the answers
    would be accepted as drafts."""

    eval_generated: int = 24
    """Number of these prompts (the first ones) for which answers are generated with the draft after the last
    step, under each of `eval_modes`; 0: all. They are generated in every evaluation if expected acceptance
    cannot be computed: for a draft with a separate directory, or with draft.depths below spec.gamma."""

    eval_offset: int = 0
    """Number of prompts to skip at the start of each held-out set."""

    eval_samples: int = 2
    """Number of samples for each prompt."""

    def __post_init__(self) -> None:
        self.drafter = Drafter(self.drafter)
        if not self.drafter.kind.has_model:
            learning = " or ".join(name for name, kind in KINDS.items() if kind.has_model)
            raise ValueError(f"adapt.drafter={self.drafter}: a lookup learns nothing. Use {learning}.")

        at_least(1, self, "adapt", "prompts", "samples", "batch", "eval_samples")
        at_least(0, self, "adapt", "eval_every", "eval_prompts", "eval_generated", "eval_offset")
        share(self, "adapt", "warmup", "context_weight")
        modes = set(self.eval_modes)
        if not modes or modes - set(CHAINS) or len(modes) < len(self.eval_modes):
            raise ValueError(
                f"adapt.eval_modes={self.eval_modes} must name one or more of {', '.join(CHAINS)}, each "
                "once: acceptance is measured at a positive temperature, on chains of drafts."
            )

    def domains(self, env: EnvConfig) -> list[tuple[str, bool]]:
        """Return (entry, whether in-domain) of every held-out set to evaluate; see `rlpipe.adapt.domains`."""
        inside = self.in_domain or [env.name.value]
        return [(entry, True) for entry in inside] + [(entry, False) for entry in self.out_of_domain]

    def environments(self, env: EnvConfig) -> list[EnvName]:
        """Return the environments in which to generate, with the environment of the rollouts first.

        Raises ValueError for an entry that is not an environment, a set of an environment, or a JSONL file.

        >>> AdaptConfig(out_of_domain=["reasoning"]).environments(EnvConfig())
        [<EnvName.SWE: 'swe'>, <EnvName.REASONING: 'reasoning'>]
        """
        known = [name.value for name in EnvName]

        # Training data from a file needs no environment, but the held-out sets may name environments.
        names = [] if self.data else [env.name]
        for entry, _ in self.domains(env):
            name = entry.split(".")[0]
            if name in known:
                names.append(EnvName(name))
            elif not entry.endswith(".jsonl"):
                raise ValueError(
                    f"held-out set {entry!r} is neither an environment ({', '.join(known)}), nor one of its "
                    "sets as in swe.held_families, nor a .jsonl file: correct adapt.in_domain or "
                    "adapt.out_of_domain."
                )
        return list(dict.fromkeys(names))
