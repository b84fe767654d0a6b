"""Names of torchvision.transforms."""

import enum

from torchvision._absent import absent


class InterpolationMode(enum.Enum):
    """Real values, because SGLang's defaults name them."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


__getattr__ = absent("torchvision.transforms")
