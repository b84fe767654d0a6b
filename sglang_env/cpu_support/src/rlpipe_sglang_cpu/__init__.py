"""What SGLang lacks to decode with an MTP layer on a CPU. Installed into SGLang's CPU environment only.

    plugin.py     the entry point SGLang calls in every process; puts the rest in place
    attention.py  the torch_native attention backend with verify steps and multi-step drafting
    verify.py     rejection sampling and target-only verification of a chain, in torch
    sgl_kernel/   a stand-in for SGLang's compiled kernels: the few a chain of drafts calls
    torchvision/  a stand-in for names that SGLang imports and a text model never uses

Checks protocol and algorithm; says nothing about CUDA graphs, overlap or speed.
"""
