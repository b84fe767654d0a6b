"""Replaces torchvision.transforms."""

import enum

from torchvision._absent import absent


class InterpolationMode(enum.Enum):
    """An enum with torchvision's values, because SGLang's defaults use them."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = absent("torchvision.transforms")
