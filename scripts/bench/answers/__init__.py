"""The answers in docs/benchmarks.md: functions that turn the contents of a result file into Markdown.

`figures.toml` names a function, as `MODULE.FUNCTION`, for every answer that is more than a sentence with
figures. This code contains no figures: every number comes from the result file.
"""

from answers import decoding, drafts, gpu, learning, loop, memory, smollm

__all__ = ["decoding", "drafts", "gpu", "learning", "loop", "memory", "smollm"]
