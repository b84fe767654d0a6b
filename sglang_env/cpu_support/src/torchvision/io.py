"""Replaces torchvision.io."""

from torchvision._absent import absent

__getattr__ = absent("torchvision.io")
