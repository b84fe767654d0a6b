"""Rotary embeddings of a config.json: frequencies, and how scaling stretches them.

Owns the reading of `rope_theta`, `rope_scaling` and `rope_parameters`, and the formulas; computes no tensors.
A key or query at position t is rotated by t * frequency in each of its planes and scaled by `magnitude`.

    linear   frequency / factor (position interpolation, Chen et al. 2023)
    llama3   wavelengths above original / low_freq_factor: as linear; wavelengths below
             original / high_freq_factor: unchanged; in between: a mix of both (Llama 3.1)
    yarn     planes that turn less than beta_slow times over the original context: as linear; planes that turn
             more than beta_fast times: unchanged; in between: a linear mix of both. The magnitude is
             0.1 ln(factor) + 1 (Peng et al. 2023, Section 3)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

SCALINGS = ("linear", "llama3", "yarn")
_OF_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


@dataclass(slots=True, kw_only=True, frozen=True)
class Rope:
    """A rotary embedding. theta: base. scaling: '' or one of SCALINGS. settings: the scaling's parameters."""

    theta: float
    scaling: str = ""
    settings: tuple[tuple[str, float], ...] = ()

    @property
    def parameters(self) -> dict[str, Any]:
        """`rope_parameters` of a config.json."""
        return {"rope_type": self.scaling or "default", "rope_theta": self.theta, **dict(self.settings)}

    def reach(self, max_position: int) -> int:
        """Return the longest supported context in tokens.

        max_position: max_position_embeddings; with yarn it may be the length before scaling.
        """
        numbers = dict(self.settings)
        stretched = 0.0
        if self.scaling == "yarn":
            stretched = numbers["factor"] * numbers["original_max_position_embeddings"]
        return max(max_position, int(stretched))

    @property
    def magnitude(self) -> float:
        """Factor of rotated keys and queries.

        >>> round(Rope(theta=1e4, scaling="yarn", settings=(("factor", 4.0),)).magnitude, 4)
        1.1386
        """
        if self.scaling != "yarn":
            return 1.0

        numbers = dict(self.settings)
        if "attention_factor" in numbers:
            return numbers["attention_factor"]

        mscale, all_dim = numbers.get("mscale"), numbers.get("mscale_all_dim")
        if mscale and all_dim:
            return _magnitude(numbers["factor"], mscale) / _magnitude(numbers["factor"], all_dim)
        return _magnitude(numbers["factor"])

    @property
    def sharpness(self) -> float:
        """Factor of queries and keys in DeepSeek's latent attention, for both rotated and unrotated parts.

        >>> yarn = (("factor", 40.0), ("mscale_all_dim", 1.0))
        >>> round(Rope(theta=1e4, scaling="yarn", settings=yarn).sharpness, 4)
        1.3689
        """
        numbers = dict(self.settings)
        all_dim = numbers.get("mscale_all_dim")
        return _magnitude(numbers["factor"], all_dim) if all_dim else 1.0

    def frequencies(self, dim: int) -> list[float]:
        """Compute the radians per position of each of the dim / 2 planes of a head of `dim` numbers.

        >>> [round(f, 3) for f in Rope(theta=100.0).frequencies(4)]
        [1.0, 0.1]
        """
        plain = [self.theta ** (-i / dim) for i in range(0, dim, 2)]
        if not self.scaling:
            return plain

        factor = dict(self.settings)["factor"]
        shares = self._unscaled_shares(plain)
        return [f * share + f / factor * (1 - share) for f, share in zip(plain, shares, strict=True)]

    def _unscaled_shares(self, plain: list[float]) -> list[float]:
        """Compute the share (0 to 1) of each plane's frequency that stays unscaled."""
        numbers = dict(self.settings)
        if self.scaling == "linear":
            return [0.0] * len(plain)

        original = numbers["original_max_position_embeddings"]
        if self.scaling == "llama3":
            low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
            turns = [original * f / (2 * math.pi) for f in plain]
            return [_clamped((t - low) / (high - low)) for t in turns]

        dim = 2 * len(plain)

        def plane(turns: float) -> float:
            """Return the (fractional) index of the plane with `turns` turns over the original context."""
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        # yarn mixes linearly between the planes that make beta_fast and beta_slow turns.
        first, last = plane(numbers.get("beta_fast") or 32), plane(numbers.get("beta_slow") or 1)
        if numbers.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last += 0.001 * (first == last)
        return [1 - _clamped((i - first) / (last - first)) for i in range(len(plain))]


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read the rotary embedding of a config.json, including older names of its settings.

    Raises:
        ValueError: the scaling is not supported, or one of its numbers is missing.
    """
    scaling = {k: v for k, v in (config.get("rope_scaling") or {}).items() if v is not None}
    written = {k: v for k, v in (config.get("rope_parameters") or {}).items() if v is not None} or scaling

    kind = written.get("rope_type") or written.get("type") or "default"
    theta = float(written.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta=theta)

    if kind not in SCALINGS:
        raise ValueError(
            f"The model's config.json asks for rope scaling of type {kind!r}, which is not supported. "
            f"Use a checkpoint with one of {', '.join(SCALINGS)}, or without scaling."
        )

    original = config.get("original_max_position_embeddings")
    written = {"original_max_position_embeddings": config.get("max_position_embeddings")} | written
    if original:
        written["original_max_position_embeddings"] = original

    needed = {"factor", "original_max_position_embeddings"}
    needed |= {"low_freq_factor", "high_freq_factor"} if kind == "llama3" else set()
    for name in sorted(needed):
        value = written.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(
                f"The model's config.json has rope scaling of type {kind!r} with {name}={value!r}: "
                "it must be a number above 0."
            )

    names = sorted(needed | (set(_OF_YARN) & written.keys() if kind == "yarn" else set()))
    return Rope(
        theta=theta, scaling=kind, settings=tuple((name, cast(float, written[name])) for name in names)
    )


def _clamped(x: float) -> float:
    return min(1.0, max(0.0, x))


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
