"""Adds MTP decoding on a CPU to SGLang. It is installed only in SGLang's CPU environment.

    plugin.py     the entry point that SGLang calls in every process; installs the other parts
    attention.py  the torch_native attention backend with verify steps and multi-step drafting
    verify.py     rejection sampling and target-only verification of a chain, in torch
    sgl_kernel/   replaces SGLang's compiled kernels: the few that a chain of drafts calls
    torchvision/  replaces names that SGLang imports and a text model never uses

The package is for tests of protocol and algorithm, not of CUDA graphs, overlap or speed.
"""
