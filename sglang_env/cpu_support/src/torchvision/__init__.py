"""A stand-in for torchvision: names that SGLang imports and that a text model never calls.

The real one exists for CUDA builds of torch only where these packages come from. Calling anything raises.
"""

__version__ = "0.0"
