"""Recognises the form of a reward function by the names of its parameters.

| form | called by name with                                            | per    | returns               |
|------|-----------------------------------------------------------------|--------|-----------------------|
| own  | completion; prompt, answer, row, messages or a column if named  | answer | a number              |
| verl | solution_str; data_source, ground_truth, extra_info if named    | answer | a number, or a dict   |
| TRL  | completions; prompts, completion_ids or a column if named       | group  | a list, with None too |

The form "own" is rlpipe's. The arguments before the semicolon identify the form; a function gets the others
only if it has parameters of these names. This module decides which arguments a function gets; `rewards`
computes their values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlpipe.config.limits import did_you_mean

FORMS = (
    "score(completion, answer) -> number, with any of prompt, answer, row, messages or a column; "
    "TRL's score(completions, **columns) -> list of numbers; "
    "verl's score(data_source, solution_str, ground_truth, extra_info=None) -> number or dict"
)


class Form(StrEnum):
    """The convention that a reward function follows."""

    OURS = "rlpipe"
    VERL = "verl"
    VERL_BATCH = "verl, in batches"
    TRL = "TRL"

    @property
    def batched(self) -> bool:
        """Return whether one call scores all answers of a group."""
        return self in (Form.TRL, Form.VERL_BATCH)


# Parameters that identify a form.
_SIGNS = {
    Form.TRL: {"completions", "completion_ids", "completions_ids"},
    Form.VERL: {"solution_str"},
    Form.VERL_BATCH: {"solution_strs"},
    Form.OURS: {"completion"},
}
# TRL's parameter for token ids; its documentation uses both spellings.
_TOKENS = {"completion_ids", "completions_ids"}
NAMES = {
    Form.TRL: {"prompts", "completions", "log_extra", "log_metric"} | _TOKENS,
    Form.VERL: {"data_source", "solution_str", "ground_truth", "extra_info"},
    Form.VERL_BATCH: {"data_sources", "solution_strs", "ground_truths", "extra_infos"},
    Form.OURS: {"completion", "prompt", "answer", "row", "messages"},
}


@dataclass(slots=True, kw_only=True, frozen=True)
class Signature:
    """How a function is called.

    names: arguments to pass. required: arguments without a default. needs_tokens: whether it has a parameter
    for token ids. is_async: whether its result must be awaited.
    """

    form: Form
    names: frozenset[str]
    required: frozenset[str]
    needs_tokens: bool
    is_async: bool


def signature_of(function: Callable[..., Any], where: str, columns: Sequence[str]) -> Signature:
    """Return how to call a reward function. Raises ValueError for an unclear form or unknown parameters.

    where: the function and its file, for messages. columns: columns of the data set.
    """
    if inspect.isclass(function):
        raise ValueError(
            f"{where} is a class: name an instance of it, or a function. The forms are: {FORMS}."
        )
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ValueError(f"{where} has no readable signature: wrap it as {FORMS}.") from None

    forms = [form for form, signs in _SIGNS.items() if signs & parameters.keys()]
    given = f"({', '.join(str(parameter) for parameter in parameters.values())})"
    if len(forms) != 1:
        both = f" mixes the forms of {' and '.join(forms)}" if forms else " is of no form that is recognised"
        raise ValueError(f"{where}{given}{both}: name its parameters as one of {FORMS}.")

    form = forms[0]
    known = NAMES[form] | (set(columns) if form in (Form.TRL, Form.OURS) else set())
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = {
        name for name, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }

    _check_parameters(parameters, where, known, columns)
    names = known if takes_all else known & named
    # Token ids need an encoding, so pass them only to functions that name them.
    names = names - (_TOKENS - named)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (of an object with an async __call__)
    )
    required = {name for name in names & named if parameters[name].default is inspect.Parameter.empty}
    return Signature(
        form=form,
        names=frozenset(names),
        required=frozenset(required),
        needs_tokens=bool(names & _TOKENS),
        is_async=is_async,
    )


def _check_parameters(parameters: Any, where: str, known: set[str], columns: Sequence[str]) -> None:
    """Raise ValueError if a function has a parameter for which there is no argument."""
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(
                f"{where}: {name} is positional only, and arguments are passed by name: drop the `/`."
            )
        if name in known or parameter.default is not parameter.empty:
            continue

        if name == "trainer_state":
            raise ValueError(
                f"{where} needs trainer_state: rewards are computed in rollout workers, which have none. "
                "Give it a default, or make the reward independent of the step."
            )
        raise ValueError(
            f"{where} needs {name!r}, which is not a column of the data set.{did_you_mean(name, columns)} It "
            f"has {', '.join(columns)}: rename the parameter, or give it a default."
        )
