"""Notes a `trainer.lr` that is far from the usual learning rates for models of that size; refuses nothing.

The usual rate is a power law fitted to the rows of docs/your_model.md that train all weights with AdamW, such
as 2e-4 at 2.4M parameters, 2e-5 at 135M and 1e-6 at 7B. It matches all these rows within a factor of four.
"""

from __future__ import annotations

from math import prod

from rlpipe.config.paths import resolve_model
from rlpipe.config.run import Config, Task
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config

FAR = 10.0  # a rate is far if it is above this many times the usual rate, or below 1 / FAR of it


def usual_rate(parameters: int) -> float:
    """Return the usual learning rate for a model with that many parameters.

    >>> f"{usual_rate(135_000_000):.0e}, {usual_rate(7_000_000_000):.0e}"
    '2e-05, 2e-06'
    """
    return 2e-5 * (135e6 / parameters) ** 0.65


def rate_note(config: Config) -> str:
    """Return a sentence about the learning rate if it is far from the usual one; else, or with LoRA, ""."""
    if config.task is not Task.RL or config.trainer.lora.active:
        return ""

    arch = read_architecture(read_config(resolve_model(config.model.path)))
    parameters = sum(prod(shape) for shape in arch.weight_shapes(mtp=False).values())
    usual, rate = usual_rate(parameters), config.trainer.lr
    if usual / FAR <= rate <= usual * FAR:
        return ""
    return (
        f"trainer.lr={rate:g}, and models of {parameters / 1e6:,.0f}M parameters are usually trained with "
        f"about {usual:.0e} (docs/your_model.md, section 6)"
    )
