"""A taskset of verifiers 0.4; the answer is a shell command that finds the file that defines a function."""

from __future__ import annotations

import re
from collections.abc import Iterator

import verifiers.v1 as vf

NAMES = re.findall(
    r"\w+",
    """
    age area bank base bill board book box card cart cell chair check city clock coin cost count day
    depth desk door fish form fruit game gate hall height item lamp leaf level limit line list load lock
    mark mean mile mode name node note page pair part pick plan plate price range rank rate ring road
    room rule salt score seat shelf ship shop show side size slot speed stamp step stock stop street sum
    table team test tide tree trip type unit value wall weight width word
    """,
)


class FunctionData(vf.TaskData):
    """The data of a task: the function to find."""

    function: str


class Find(vf.Task[FunctionData]):
    """Task: search by grep for the definition of a function."""

    @vf.reward(weight=0.9)
    async def names_it(self, task: FunctionData, trace: vf.Trace) -> float:
        """Score 1 for a search for the definition of that function."""
        return float(re.match(rf"grep -l 'def {task.function}\b'", trace.last_reply) is not None)

    @vf.reward(weight=0.1)
    async def searches(self, trace: vf.Trace) -> float:
        """Score 1 for a search for any definition."""
        return float(trace.last_reply.startswith("grep -l 'def "))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        """Return the length of the answer."""
        return len(trace.last_reply)


class Functions(vf.Taskset[Find]):
    """A taskset with one task for each function name."""

    def load(self) -> Iterator[Find]:
        """Yield the tasks."""
        for name in NAMES:
            prompt = f"Find the file that defines {name}."
            yield Find(FunctionData(name=name, function=name, prompt=prompt), self.config.task)
