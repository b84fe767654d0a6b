"""Makes checkpoints that a run can start from: released models, GGUF files, models without an MTP layer.

gguf.py       a GGUF file to a Hugging Face checkpoint
fetch.py      a released model: package, checksums, conversion, checks, the user's cache
mtp_layer.py  an MTP layer as a file, and a checkpoint that gets one
    graft.py      a copy of a dense model with an MTP layer
    closed_form.py   its start by least squares, and its acceptance
    samples.py    sequences to fit it on
"""
