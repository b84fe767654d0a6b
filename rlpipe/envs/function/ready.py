"""Built-in reward functions, by their names in the setting `reward`.

Each function is made from its options (`reward={NAME: {option: value}}`), which are checked before the run
starts, and has rlpipe's form of parameters. Three of them use libraries: math-verify, jsonschema and
reasoning-gym.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.config.data import Weighted
from rlpipe.config.env import EnvConfig
from rlpipe.config.limits import did_you_mean
from rlpipe.config.paths import resolve
from rlpipe.envs.function.code_tests import code_tests

Score = Callable[..., float]
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def make_ready(setting: Weighted, env: EnvConfig, columns: Sequence[str]) -> Score:
    """Make a built-in function. Raises ValueError if its options are wrong or it cannot run here."""
    make, takes = READY[setting.name]
    for option in setting.options:
        if option not in takes:
            raise ValueError(
                f"reward={setting.name} has no option {option!r}.{did_you_mean(option, takes)} It has "
                f"{', '.join(takes) or 'none'}, and weight."
            )
    return make(env, list(columns), **setting.options)


def exact_match(env: EnvConfig, columns: list[str], *, ignore_case: bool = False) -> Score:
    """Make the reward that is 1 if the completion equals the answer, ignoring surrounding white space."""

    def score(completion: str, answer: Any) -> float:
        got, wanted = completion.strip(), str(_required(answer, "exact_match")).strip()
        return float(got.lower() == wanted.lower() if ignore_case else got == wanted)

    return score


def regex(env: EnvConfig, columns: list[str], *, pattern: str = "", ignore_case: bool = False) -> Score:
    """Make the reward that is 1 if the completion matches the pattern.

    If the pattern has a group, the reward is 1 if the group's last match equals the answer. Raises ValueError
    if the pattern is missing, is not a regular expression, or has several groups.
    """
    if not pattern:
        raise ValueError(
            "reward=regex needs a pattern, as in 'reward={regex: {pattern: \"answer is (.+)\"}}'."
        )
    try:
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except re.error as error:
        raise ValueError(f"reward=regex: pattern={pattern!r} is not a regular expression: {error}.") from None
    if compiled.groups > 1:
        raise ValueError(
            f"reward=regex: pattern={pattern!r} has {compiled.groups} groups: use one, for the answer, and "
            "(?:...) for others."
        )

    def found(completion: str) -> float:
        return float(compiled.search(completion) is not None)

    def captured(completion: str, answer: Any) -> float:
        matches = compiled.findall(completion)
        return float(bool(matches) and matches[-1].strip() == str(_required(answer, "regex")).strip())

    return captured if compiled.groups else found


def json_schema(env: EnvConfig, columns: list[str], *, schema: Any = None) -> Score:
    """Make the reward that is 1 if the last fenced block, or else the completion, is JSON that fits a schema.

    schema: a file or a mapping; None: the column `schema` of each row, an object or JSON text. Raises
    ValueError if there is neither, or if the schema is not valid.
    """
    if schema is None and "schema" not in columns:
        raise ValueError(
            "reward=json_schema needs a schema: 'reward={json_schema: {schema: schema.json}}', or a column "
            "schema."
        )
    fixed = None if schema is None else _validator(schema)

    def score(completion: str, row: Mapping[str, Any]) -> float:
        validator = fixed or _validator(row["schema"])
        text = (_FENCED.findall(completion) or [completion])[-1]
        try:
            return float(validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            return 0.0

    return score


def _validator(schema: Any) -> Any:
    """Return a validator for a schema: a mapping, a file or JSON text. Raises ValueError if it is invalid."""
    import jsonschema

    if isinstance(schema, str) and not schema.lstrip().startswith("{"):
        path = resolve(schema)
        if not path.is_file():
            raise ValueError(f"reward=json_schema: there is no file {path}: correct the option schema.")
        schema = path.read_text()
    try:
        loaded = json.loads(schema) if isinstance(schema, str) else schema
        jsonschema.Draft202012Validator.check_schema(loaded)
    except (ValueError, jsonschema.SchemaError) as error:
        reason = getattr(error, "message", str(error))
        raise ValueError(f"reward=json_schema: the schema is not valid: {reason:.200}.") from None
    return jsonschema.Draft202012Validator(loaded)


def math_verify(env: EnvConfig, columns: list[str]) -> Score:
    """Make the reward that is 1 if math-verify finds the answer in the completion, as LaTeX or plain text.

    Raises ValueError if the library is not installed.
    """
    try:
        import math_verify as library
    except ImportError:
        raise ValueError(
            "reward=math_verify needs the library math-verify: pip install math-verify."
        ) from None

    # The library's time limits need signals, and so the main thread: turn them off. env.step_timeout_s limits
    # each step instead.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)

    read: Any = library.parse

    def parse(text: str) -> Any:
        return read(text, parsing_timeout=None)

    def score(completion: str, answer: Any) -> float:
        wanted = str(_required(answer, "math_verify"))
        gold = parse(wanted) or parse(f"${wanted}$")
        if not gold:
            raise ValueError(
                f"math_verify cannot read the answer {wanted!r:.80}: write it as LaTeX or a number"
            )
        return float(library.verify(gold, parse(completion), timeout_seconds=None))

    return score


def reasoning_gym(env: EnvConfig, columns: list[str], *, dataset: str = "") -> Score:
    """Make the reward that scores rows from reasoning-gym (question, answer, metadata) with the library.

    dataset: name of the library's data set; "": `metadata.source_dataset` of each row. The scored answer is
    the text in the last <answer> tag, or the completion if there is none. Raises ValueError for an unknown
    data set or a missing column `metadata`.
    """
    if "metadata" not in columns:
        raise ValueError(
            "reward=reasoning_gym needs the column metadata, as reasoning_gym.create_dataset makes it: store "
            f"whole entries. The columns are {', '.join(columns)}."
        )

    from reasoning_gym.factory import DATASETS, get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    if dataset and dataset not in DATASETS:
        raise ValueError(
            f"reward=reasoning_gym: it has no data set {dataset!r}.{did_you_mean(dataset, DATASETS)} "
            "Correct the option dataset."
        )
    scorers: dict[str, Any] = {}

    def score(completion: str, row: Mapping[str, Any]) -> float:
        entry = dict(row)
        if isinstance(entry["metadata"], str):
            entry["metadata"] = json.loads(entry["metadata"])
        name = dataset or entry["metadata"]["source_dataset"]
        if name not in scorers:
            scorers[name] = get_score_answer_fn(name)
        answer = extract_answer(completion)
        try:
            return float(scorers[name](completion.strip() if answer is None else answer, entry))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, SyntaxError):
            return 0.0  # scorers raise many kinds of errors for unreadable answers

    return score


def _required(answer: Any, name: str) -> Any:
    if answer is None:
        raise ValueError(
            f"reward={name} compares with an answer, and the row has none: add it, or leave such rows out "
            "with data.filter"
        )
    return answer


# Name -> (function that makes the reward function, names of its options).
READY: dict[str, tuple[Callable[..., Score], tuple[str, ...]]] = {
    "exact_match": (exact_match, ("ignore_case",)),
    "regex": (regex, ("pattern", "ignore_case")),
    "json_schema": (json_schema, ("schema",)),
    "math_verify": (math_verify, ()),
    "reasoning_gym": (reasoning_gym, ("dataset",)),
    "code_tests": (code_tests, ("column", "partial")),
}
