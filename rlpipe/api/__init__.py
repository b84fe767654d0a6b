"""The Python API behind `import rlpipe`: runs from Python, and an engine to generate with."""
