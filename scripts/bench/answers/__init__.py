"""How the answers of docs/benchmarks.md read: from the contents of a result file to Markdown.

`figures.toml` names a function, as `MODULE.FUNCTION`, for every answer that is more than a sentence with
figures. Nothing here is a figure: every number comes from the file.
"""

from answers import decoding, drafts, gpu, learning, loop, memory, smollm

__all__ = ["decoding", "drafts", "gpu", "learning", "loop", "memory", "smollm"]
