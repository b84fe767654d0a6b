"""Replaces torchvision.transforms.v2."""

from torchvision._absent import absent
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
__getattr__ = absent("torchvision.transforms.v2")
