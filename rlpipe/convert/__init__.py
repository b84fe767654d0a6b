"""Makes checkpoints that a run can start from: released models, GGUF files, models without an MTP layer.

gguf.py       a GGUF file to a Hugging Face checkpoint
fetch.py      download of a released model: package, checksums, conversion, checks, the user's cache
mtp_layer.py  reading an MTP layer from a file and adding it to a checkpoint
    graft.py      a copy of a dense model with an MTP layer
    closed_form.py   the layer's initial weights by least squares, and its acceptance
    samples.py    the sequences to fit the layer on
"""
