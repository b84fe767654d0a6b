"""Wording of the answers in docs/benchmarks.md: turns the contents of a result file into Markdown.

`figures.toml` names a function, as `MODULE.FUNCTION`, for every answer that is more than a sentence with
figures. No figure is written here: every number comes from the file.
"""

from answers import decoding, drafts, gpu, learning, loop, memory, smollm

__all__ = ["decoding", "drafts", "gpu", "learning", "loop", "memory", "smollm"]
