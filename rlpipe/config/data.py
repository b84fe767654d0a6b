"""Settings of a task that consists of a data set and a reward function. Imports no torch, reads no file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least
from rlpipe.config.user_code import absolute

SPLIT_PREFIX = "split:"  # data.held_out=split:test names another split of the data set in data.train


class DataFormat(Choice):
    """How a data set is stored."""

    AUTO = "auto"  # recognised by the name
    JSONL = "jsonl"  # an object per line, also as .gz
    JSON = "json"  # a list of objects, also as .gz
    CSV = "csv"  # the first line has the names of columns, also as .gz
    PARQUET = "parquet"
    HUGGING_FACE = "hf"  # a folder, or an id on the Hugging Face hub, read by the library `datasets`


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """The data set of the environment `function`. Each row has a prompt and the data for its reward."""

    train: str = ""
    """Rows to train on: a file (.jsonl, .json, .csv, .parquet), a folder that the library `datasets` can
    read, or an id on the Hugging Face hub such as openai/gsm8k."""

    held_out: Any = None
    """Rows to validate on, which are never trained on: a file, folder or id as in `train`; `split:NAME`,
    another split of the same data set; or a share of the rows of `train`, such as 0.1. By default this is a
    tenth of these rows, but at most 1000."""

    format: DataFormat = DataFormat.AUTO
    """See `DataFormat`."""

    split: str = "train"
    """Split of a Hugging Face data set that `train` reads."""

    subset: str = ""
    """Subset (configuration) of a Hugging Face data set."""

    prompt: str = ""
    """Column of the prompt, which is a text or a list of chat messages. Empty: the first existing column of
    prompt, question, problem, instruction, query, input, messages."""

    answer: str = ""
    """Column of the right answer. Empty: the first existing column of answer, ground_truth, solution, target,
    label, expected; or verl's reward_model.ground_truth."""

    template: str = ""
    """How the prompt is created from columns: a text such as Question: {question}, a file with such a text
    (.txt, .md), or a function of the row (file.py:NAME) that returns a text or messages. On a command line,
    write a text as 'data.template="Question: {question}"'."""

    system: str = ""
    """System message in front of every prompt."""

    filter: str = ""
    """A function (file.py:NAME) that receives a row and returns whether it is used."""

    limit: int = 0
    """Number of rows of `train` to use, including held-out rows; 0: all."""

    shuffle: bool = True
    """Shuffle the rows before `limit` and the held-out share are applied. (The order of prompts in each
    training epoch depends only on run.seed.)"""

    seed: int = 0
    """Seed of this shuffling. It is separate from run.seed, so that runs with several seeds have the same
    held-out set."""

    max_prompt_tokens: int = 0
    """Rows with longer prompts are dropped and counted. 0: drop rows if prompt and rollout.max_new_tokens
    together exceed rollout.max_context."""

    def __post_init__(self) -> None:
        self.format = DataFormat(self.format)
        self.filter, self.template = absolute(self.filter), _absolute_template(self.template)
        at_least(0, self, "data", "limit", "max_prompt_tokens", remedy="0 sets no limit")
        self.held_out = _held_out(self.held_out)
        self._check_disjoint()
        if self.format is DataFormat.AUTO and self.subset and Path(self.train).is_file():
            raise ValueError(
                f"data.subset={self.subset} with data.train={self.train}: only Hugging Face data sets have "
                "subsets, and this is a file. Leave it out."
            )

    def _check_disjoint(self) -> None:
        """Refuse to validate on rows that are trained on. Raises ValueError."""
        same_split = self.held_out_name == f"{SPLIT_PREFIX}{self.split}"
        if self.held_out_name and (same_split or self._path(self.held_out_name) == self._path(self.train)):
            raise ValueError(
                f"data.held_out={self.held_out} is data.train={self.train}: validation would measure what "
                "was trained on. Name other rows, or a share of these, as in data.held_out=0.1."
            )

    @staticmethod
    def _path(name: str) -> Path:
        return Path(name).expanduser().resolve()

    @property
    def share(self) -> float | None:
        """Share of held-out rows; None by default, or if the held-out rows are a separate data set."""
        return self.held_out if isinstance(self.held_out, float) else None

    @property
    def held_out_name(self) -> str:
        """Name of the held-out data set; empty if it is a share of the rows of `train`."""
        return self.held_out if isinstance(self.held_out, str) else ""


def _absolute_template(template: str) -> str:
    """Return the template; if it names a function's file, make the path absolute."""
    return template if "{" in template else absolute(template)


def _held_out(value: Any) -> float | str | None:
    """Return a share or the name of a data set. Raises ValueError for anything else."""
    if value is None or (isinstance(value, str) and value):
        return value

    is_share = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1
    if not is_share:
        raise ValueError(
            f"data.held_out={value!r} must be a share between 0 and 1, such as 0.1, or a file: training "
            "and validation both need rows."
        )
    return float(value)


@dataclass(slots=True, kw_only=True)
class Weighted:
    """Name of a reward function, its weight in the sum, and the options with which it is called."""

    name: str
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


def weighted_rewards(setting: Any) -> list[Weighted]:
    """Return the functions that the setting `reward` names. Raises ValueError.

    >>> weighted_rewards("exact_match")
    [Weighted(name='exact_match', weight=1.0, options={})]
    >>> weighted_rewards({"exact_match": 0.7, "regex": {"weight": 0.3, "pattern": "a+"}})[1]
    Weighted(name='regex', weight=0.3, options={'pattern': 'a+'})
    """
    if isinstance(setting, str) and setting:
        return [Weighted(name=absolute(setting))]
    if isinstance(setting, (list, tuple)) and setting:
        return [one for entry in setting for one in weighted_rewards(entry)]
    if isinstance(setting, Mapping) and setting:
        return [_weighted(str(name), value) for name, value in setting.items()]
    raise ValueError(
        f"reward={setting!r} names no function: give reward=my_reward.py:score, a ready one such as "
        "reward=exact_match, a list, or weights as in 'reward={my_reward.py:score: 0.7, exact_match: 0.3}'."
    )


def _weighted(name: str, value: Any) -> Weighted:
    """Return one reward. value: a weight, or a mapping with `weight` and options of the function."""
    options = dict(value) if isinstance(value, Mapping) else {}
    weight = options.pop("weight", 1.0) if isinstance(value, Mapping) else value

    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight):
        raise ValueError(
            f"reward: the weight of {name} is {weight!r}: give a finite number, as in "
            f"'reward={{{name}: 0.5}}'."
        )
    return Weighted(name=absolute(name), weight=float(weight), options=options)


@dataclass(slots=True, kw_only=True)
class FunctionTask:
    """Inputs of the environment `function`, from the settings `data`, `reward` and `model.path`."""

    data: DataConfig = field(default_factory=DataConfig)

    reward: Any = None
    """The setting `reward`."""

    model: str = ""
    """Checkpoint with the tokenizer that counts the tokens of prompts: `model.path`."""
