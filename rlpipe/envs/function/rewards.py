"""Calls reward functions on the answers to one prompt, and returns the weighted sum of their rewards.

A function gets all answers at once or one at a time, depending on its form (`signature`). The reward of each
function is recorded as `reward_NAME`. Other values that it reports (verl's dict, TRL's log_metric and
log_extra) are recorded under the names that the function gives them. All coroutines of this process run in
one event loop.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from rlpipe.config.data import FunctionTask, Weighted, weighted_rewards
from rlpipe.config.env import EnvConfig
from rlpipe.config.limits import did_you_mean
from rlpipe.config.user_code import is_user_code, load_function
from rlpipe.envs.contract import number_of, shown
from rlpipe.envs.function.examples import Example
from rlpipe.envs.function.signature import Form, Signature, signature_of
from rlpipe.envs.user_loop import UserLoop

Encode = Callable[[str], list[int]]
LOOP = UserLoop()  # one loop for all coroutines, so that their HTTP clients can stay open


@dataclass(slots=True, kw_only=True)
class Score:
    """A function's score for one answer. value: None if the function does not apply to the answer."""

    value: float | None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Reward:
    """One reward function. where: text of the setting that names it, for messages."""

    name: str
    weight: float
    where: str
    function: Callable[..., Any]
    signature: Signature
    encode: Encode | None = None

    def calls(self, example: Example, answers: Sequence[str]) -> list[Call]:
        """Return the calls that score the answers to one prompt."""
        groups = [list(answers)] if self.signature.form.batched else [[answer] for answer in answers]
        return [Call(reward=self, example=example, answers=group) for group in groups]


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a reward function. logged: values that it passed to TRL's log_metric and log_extra."""

    reward: Reward
    example: Example
    answers: list[str]
    logged: list[dict[str, Any]] = field(default_factory=list)

    def prepared(self) -> Callable[[], Any]:
        """Return the function with its arguments bound."""
        self.logged = [{} for _ in self.answers]
        return functools.partial(self.reward.function, **self.arguments())

    def invoke(self) -> Any:
        """Call the function and await its result, without checking it."""
        returned = self.prepared()()
        return LOOP.run(returned) if inspect.isawaitable(returned) else returned

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the function's signature names."""
        reward, example = self.reward, self.example
        columns: Mapping[str, Any] = example.row
        if reward.signature.form is Form.OURS:
            made = {
                "completion": self.answers[0],
                "prompt": example.text,
                "answer": example.answer,
                "row": dict(example.row),
                "messages": [dict(message) for message in example.messages],
            }
            made = dict(columns) | made
        elif reward.signature.form is Form.TRL:
            made = {name: [value] * len(self.answers) for name, value in columns.items()} | self._trl()
        else:
            made = self._verl()

        # The rows of a JSONL file may have different columns.
        if missing := reward.signature.required - made.keys():
            raise ValueError(
                f"{example.place} has no column {min(missing)!r}, which {reward.where} needs: add it, leave "
                "such rows out with data.filter, or give the parameter a default."
            )
        return {name: value for name, value in made.items() if name in reward.signature.names}

    def _trl(self) -> dict[str, Any]:
        """Return TRL's arguments. If the prompt is a list of messages, completions are messages too."""
        conversational = not isinstance(self.example.prompt, str)
        completions: list[Any] = list(self.answers)
        if conversational:
            completions = [[{"role": "assistant", "content": answer}] for answer in self.answers]

        encode = self.reward.encode
        ids = [encode(answer) for answer in self.answers] if encode else []
        return {
            "prompts": [self.example.prompt] * len(self.answers),
            "completions": completions,
            "completion_ids": ids,
            "completions_ids": ids,
            "log_extra": self._log_extra,
            "log_metric": self._log_metric,
        }

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        for logged, value in zip(self.logged, values, strict=False):
            logged[str(column)] = _recorded(value)

    def _log_metric(self, name: str, value: float) -> None:
        for logged in self.logged:
            logged[str(name)] = _recorded(value)

    def _verl(self) -> dict[str, Any]:
        """Return verl's arguments; if the column `extra_info` is missing, the row replaces it."""
        example, row = self.example, self.example.row
        source = row.get("data_source", PurePath(example.place.partition(":")[0]).stem)
        extra = row["extra_info"] if "extra_info" in row else dict(row)
        single = {"data_source": source, "ground_truth": example.answer, "extra_info": extra}

        batched = {f"{name}s": [value] * len(self.answers) for name, value in single.items()}
        return single | batched | {"solution_str": self.answers[0], "solution_strs": list(self.answers)}

    def read(self, returned: Any) -> list[Score]:
        """Return the scores in a returned value. Raises ValueError if it is not of the function's form."""
        form = self.reward.signature.form
        if not form.batched:
            return [self._score(returned, self.logged[0], optional=False)]

        if type(returned).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(returned, "tolist"):
            returned = returned.tolist()
        if not isinstance(returned, (list, tuple)):
            raise ValueError(
                f"{self.reward.name} returned {shown(returned)}: return a list, one number per answer."
            )
        if len(returned) != len(self.answers):
            raise ValueError(
                f"{self.reward.name} returned {len(returned)} rewards for {len(self.answers)} answers: "
                "return one number per answer."
            )
        return [
            self._score(value, logged, optional=form is Form.TRL)
            for value, logged in zip(returned, self.logged, strict=True)
        ]

    def _score(self, value: Any, logged: dict[str, Any], *, optional: bool) -> Score:
        """Return the score of one answer. optional: None is allowed; the function does not apply then."""
        name, info = self.reward.name, dict(logged)
        if optional and value is None:
            return Score(value=None, info=info)

        if isinstance(value, Mapping) and self.reward.signature.form is not Form.OURS:
            if "score" not in value:
                raise ValueError(f"{name} returned {shown(value)}: the dict needs a number under 'score'.")
            info |= {str(key): _recorded(each) for key, each in value.items() if key != "score"}
            value = value["score"]
        if value is None or isinstance(value, (str, list, tuple, Mapping)):
            raise ValueError(
                f"{name} returned {shown(value)}: return a number (True and False count as 1 and 0)."
            )
        return Score(value=number_of(f"the reward of {name}", value, "return a finite number"), info=info)


def _recorded(value: Any) -> Any:
    """Convert a value to what the run records: a number or a short text."""
    if isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value if not isinstance(value, str) else value[:200]
    try:
        return number_of("", value)
    except ValueError:
        return str(value)[:200]


def total(
    rewards: Sequence[Reward], scores: Sequence[Sequence[Score]], place: str
) -> list[tuple[float, dict[str, Any]]]:
    """Return (reward, info) of each answer, where the reward is the weighted sum over all functions.

    scores: for each function, the score of each answer. Raises ValueError if no function applies to an
    answer.
    """
    totals = []
    for of_answer in zip(*scores, strict=True):
        applied = [(r, s.value) for r, s in zip(rewards, of_answer, strict=True) if s.value is not None]
        if not applied:
            raise ValueError(
                f"{place}: every reward function returned None for this row, so it has no reward: leave such "
                "rows out with data.filter."
            )

        info: dict[str, Any] = {}
        for reward, score in zip(rewards, of_answer, strict=True):
            # If two functions report a value of the same name, add the function's name to the second.
            info |= {
                (f"{reward.name}_{key}" if key in info else key): value for key, value in score.info.items()
            }
        info |= {f"reward_{reward.name}": value for reward, value in applied}
        totals.append((sum(reward.weight * value for reward, value in applied), info))
    return totals


def score_answers(
    rewards: Sequence[Reward], example: Example, answers: Sequence[str]
) -> list[tuple[float, dict[str, Any]]]:
    """Return (reward, info) of each answer to one prompt."""
    scores = [
        [score for call in reward.calls(example, answers) for score in call.read(call.invoke())]
        for reward in rewards
    ]
    return total(rewards, scores, example.place)


# --- loading ----------------------------------------------------------------------------------------------


def load_rewards(task: FunctionTask, env: EnvConfig, columns: Sequence[str], encode: Encode) -> list[Reward]:
    """Load the functions that the setting `reward` names, in order. Raises ValueError if one is invalid.

    columns: columns of the data set. encode: converts text to token ids, for functions that need them.
    """
    from rlpipe.envs.function.ready import READY, make_ready

    settings = weighted_rewards(task.reward)
    names = _names(settings)
    rewards = []
    for setting, name in zip(settings, names, strict=True):
        where = f"reward={setting.name}"
        if is_user_code(setting.name):
            function = load_function(setting.name, setting="reward", takes="completion, answer")
            function = _with_options(function, setting) if setting.options else function
        elif setting.name in READY:
            function = make_ready(setting, env, columns)
        else:
            raise ValueError(
                f"{where}: there is no such function.{did_you_mean(setting.name, READY)} Name yours as "
                f"file.py:NAME, or a ready one: {', '.join(READY)}."
            )
        signature = signature_of(function, where, columns)
        rewards.append(
            Reward(
                name=name,
                weight=setting.weight,
                where=where,
                function=function,
                signature=signature,
                encode=encode if signature.needs_tokens else None,
            )
        )
    return rewards


def _with_options(function: Callable[..., Any], setting: Weighted) -> Callable[..., Any]:
    """Return a function with the options of its setting bound. Raises ValueError for an unknown option."""
    try:
        inspect.signature(function).bind_partial(**setting.options)
    except TypeError as error:
        raise ValueError(
            f"reward={setting.name} has options that it does not take ({error}): its signature is "
            f"{getattr(function, '__name__', 'score')}{inspect.signature(function)}."
        ) from None
    return functools.partial(function, **setting.options)


def _names(settings: Sequence[Weighted]) -> list[str]:
    """Return a short unique name for each function. Raises ValueError if a function is named twice."""
    if len({setting.name for setting in settings}) < len(settings):
        twice = next(s.name for s in settings if [each.name for each in settings].count(s.name) > 1)
        raise ValueError(f"reward names {twice} twice: name it once, with its weight.")

    short = [setting.name.rpartition(":")[2] for setting in settings]
    return [
        name if short.count(name) == 1 else f"{PurePath(setting.name.rpartition(':')[0]).stem}_{name}"
        for name, setting in zip(short, settings, strict=True)
    ]
