"""Replaces torchvision.transforms.v2.functional."""

from torchvision._absent import absent

__getattr__ = absent("torchvision.transforms.v2.functional")
