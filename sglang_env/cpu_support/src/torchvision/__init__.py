"""Replaces torchvision: names that SGLang imports and that a text model never calls.

The package index has the real torchvision only for CUDA builds of torch. Every call of a name raises.
"""

__version__ = "0.0"
