"""The tools of an instance: search and read its documents, calculate, run Python.

Owns the results of the tools. Only the tool `python` executes code of the model, and only in the sandbox,
where the documents are files. The sandbox keeps its work tree during the episode.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rlpipe.config.env import ToolName
from rlpipe.envs.sandbox import Sandbox
from rlpipe.envs.tools.calculator import calculate
from rlpipe.envs.tools.generate import Document, Instance
from rlpipe.envs.tools.schema import Tool, ToolError, text_tool

HITS = 2
_LONGEST_CODE = 20_000  # maximum number of characters
_WORD = re.compile(r"[a-z0-9]+")
_COMMON = {"of", "the", "a", "and"}


def search(documents: dict[str, Document], query: str) -> str:
    """Return the headers of the documents that share the most words with the query, best first.

    >>> store = Document(attribute="age", values={"fish": 3})
    >>> search({"store": store}, "age of the fish")
    'store: age of fish'
    """
    words = set(_WORD.findall(query.lower())) - _COMMON
    scores = [(len(words & set(_WORD.findall(d.header))), name) for name, d in documents.items()]

    # Order equal scores by name, so that a search is reproducible.
    hits = [name for score, name in sorted(scores, key=lambda x: (-x[0], x[1])) if score][:HITS]
    if not hits:
        raise ToolError("search: nothing found")
    return "\n".join(f"{name}: {documents[name].header}" for name in hits)


def read(documents: dict[str, Document], document: str) -> str:
    """Return the text of a document."""
    if document not in documents:
        raise ToolError(f"read: no document {document!r:.60}")
    return documents[document].text


def run_python(sandbox: Sandbox, code: str) -> str:
    """Run a program; return its output.

    Raises ToolError if the program fails, and InfrastructureError if the sandbox fails.
    """
    if len(code) > _LONGEST_CODE:
        raise ToolError(f"python: the program has more than {_LONGEST_CODE} characters")

    code = code.encode(errors="replace").decode().replace("\0", "")  # a shell accepts no NUL or surrogate
    result = sandbox.run(shlex.join(["python3", "-I", "-B", "-c", code]))

    if result.exceeded:
        raise ToolError(f"python: {result.exceeded}")

    text = result.output.rstrip("\n")
    if result.exit_code:
        raise ToolError(f"python: {text.splitlines()[-1] if text else f'exit status {result.exit_code}'}")
    return text


def files(instance: Instance) -> dict[str, str]:
    """Return the files that a Python program can read: NAME.txt for every document."""
    return {f"{name}.txt": document.text + "\n" for name, document in instance.documents.items()}


def make_tools(
    names: Sequence[ToolName], documents: dict[str, Document], sandbox: Sandbox | None
) -> list[Tool]:
    """Make the named tools for these documents. sandbox: needed only when `python` is called."""
    known = {
        ToolName.SEARCH: text_tool(
            "search",
            "Find documents by words. Returns lines of 'document: what it holds', best match first.",
            {"query": "words to look for"},
            lambda query: search(documents, query),
        ),
        ToolName.READ: text_tool(
            "read",
            "Read a document.",
            {"document": "its name, as search returns it"},
            lambda document: read(documents, document),
        ),
        ToolName.CALCULATE: text_tool(
            "calculate",
            "Evaluate numbers joined by + - * / and parentheses.",
            {"expression": "for example 3 * (4 + 5)"},
            lambda expression: calculate(expression),
        ),
        ToolName.PYTHON: text_tool(
            "python",
            "Run a Python program in a sandbox and return what it prints. Documents are files NAME.txt.",
            {"code": "the program"},
            lambda code: run_python(_required(sandbox), code),
        ),
    }
    return [known[name] for name in names]


def _required(sandbox: Sandbox | None) -> Sandbox:
    assert sandbox is not None, "the python tool was called without a sandbox"
    return sandbox
