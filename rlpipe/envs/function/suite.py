"""Single-turn episodes over the rows of a data set, rewarded by functions.

An instance is a row: "train/17" is row 17 (1-based) of the training data set. A row is read when its episode
starts. The first call of `instance_ids`, in the process that launches the run, selects the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from rlpipe.config.env import EnvConfig
from rlpipe.config.paths import resolve_model
from rlpipe.envs.base import TRAIN, GroupMember, StepResult
from rlpipe.envs.function.examples import ANSWERS, Example, Reader
from rlpipe.envs.function.rewards import Reward, load_rewards, score_answers
from rlpipe.envs.function.rows import Rows, read_rows
from rlpipe.envs.function.splits import Checked, Splits, check_rows, make_splits

HELD_OUT = "held_out"


class FunctionEpisode:
    """One answer to one prompt.

    grouped: all answers of the group are scored together, after the last one has finished.
    """

    def __init__(self, example: Example, rewards: Sequence[Reward], *, grouped: bool) -> None:
        self._example, self._rewards, self._grouped = example, rewards, grouped

    def messages(self) -> list[dict[str, str]]:
        """Return the prompt."""
        return self._example.messages

    def step(self, action: str) -> StepResult:
        """Score the answer."""
        if self._grouped:
            return StepResult(done=True, reward=0.0, info={"submitted": True})

        ((reward, info),) = score_answers(self._rewards, self._example, [action])
        return StepResult(done=True, reward=reward, info=info | {"submitted": True})

    def finish(self) -> StepResult:
        """End without an answer, for reward 0; not called in practice, as the first turn is the answer."""
        return StepResult(done=True, reward=0.0, info={"submitted": False})

    def close(self) -> None:
        """Do nothing: an episode holds no resources."""


class FunctionSuite:
    """A suite of the rows of a data set. Splits: `train` and `held_out`.

    notes: sentences on the data for the user, added by `instance_ids` and `drop_long`.
    Raises ValueError for wrong settings or data.
    """

    max_turns = 1

    def __init__(self, config: EnvConfig) -> None:
        task = config.function
        if not task.data.train:
            raise ValueError("data.train is empty: name the rows to train on, as in data.train=train.jsonl.")
        if task.reward is None:
            raise ValueError(
                "reward is empty: name a function, as in reward=my_reward.py:score, or a ready one, as in "
                "reward=exact_match."
            )
        self._task = task
        self.notes: list[str] = []
        self._encoder: Any = None

        train = read_rows(task.data, "data.train", task.data.train)
        self._readers = {TRAIN: Reader(task.data, train)}
        self._rows = {TRAIN: train}
        if name := task.data.held_out_name:
            self._rows[HELD_OUT] = read_rows(task.data, "data.held_out", name)
            self._readers[HELD_OUT] = Reader(task.data, self._rows[HELD_OUT])

        self.rewards = load_rewards(task, config, train.columns, self._encode)

        for rows, reader in zip(self._rows.values(), self._readers.values(), strict=True):
            _check_answers(self.rewards, rows, reader)

        # A batched function may compare answers, so it gets all attempts at a prompt in one call.
        self._grouped = any(reward.signature.form.batched for reward in self.rewards)
        if self._grouped:
            self.score_group = self._score_group

    def splits(self) -> Sequence[str]:
        """Return the name of the held-out set."""
        return [HELD_OUT]

    def instance_ids(self, split: str) -> Sequence[str]:
        """Return the ids of a split, in a fixed order."""
        return self._ids[split]

    def episode(self, instance_id: str) -> FunctionEpisode:
        """Start a new attempt at a row."""
        return FunctionEpisode(self.example(instance_id), self.rewards, grouped=self._grouped)

    def _score_group(self, instance_id: str, results: list[GroupMember]) -> list[float]:
        """Score all answers to a prompt together."""
        answers = [result.text for result in results]
        scored = score_answers(self.rewards, self.example(instance_id), answers)
        for result, (_, info) in zip(results, scored, strict=True):
            result.info |= info
        return [reward for reward, _ in scored]

    def example(self, instance_id: str) -> Example:
        """Return the example of an instance's row."""
        table, _, number = instance_id.partition("/")
        return self._readers[table][int(number) - 1]

    def drop_long(self, count: Callable[[list[dict[str, str]]], int], limit: int) -> None:
        """Drop prompts of more than `limit` tokens. Raises ValueError if no prompt is left.

        count: function that returns the number of tokens of messages, chat template included.
        """
        # A token has at least one byte, so a prompt with few bytes fits and need not be encoded.
        overhead = count([{"role": "user", "content": "x"}])

        # Render one prompt of each split, because the template may reject a role even in short prompts.
        for split in (TRAIN, HELD_OUT):
            count(self.example(self._ids[split][0]).messages)

        for split, positions in (("train", self._splits.train), (HELD_OUT, self._splits.held_out)):
            checked = self._checked[self._table(split)]
            ids, kept, dropped = self._ids[split], [], []
            for position, instance_id in zip(positions, ids, strict=True):
                tokens = 0
                if checked.sizes[position] + 4 * overhead > limit:
                    tokens = count(self.example(instance_id).messages)
                (dropped if tokens > limit else kept).append((instance_id, tokens))

            if not dropped:
                continue
            longest, most = max(dropped, key=lambda each: each[1])
            what = (
                f"{len(dropped)} of {len(ids)} {split} prompts have more than {limit} tokens (the longest "
                f"{most}, {self.example(longest).place})"
            )
            if not kept:
                raise ValueError(
                    f"{what}, and none is left: raise rollout.max_context, or data.max_prompt_tokens if it "
                    "is set."
                )
            self.notes.append(
                f"{what} and are left out; rollout.max_context and rollout.max_new_tokens set the limit"
            )
            self._ids[split] = [instance_id for instance_id, _ in kept]

    def _table(self, split: str) -> str:
        """Return the name of the data set that holds a split's rows."""
        return split if split in self._readers else TRAIN

    @cached_property
    def _checked(self) -> dict[str, Checked]:
        data = self._task.data
        return {name: check_rows(data, self._rows[name], reader) for name, reader in self._readers.items()}

    @cached_property
    def _splits(self) -> Splits:
        splits = make_splits(self._task.data, self._checked[TRAIN], self._checked.get(HELD_OUT))
        self.notes.append(
            f"data: {len(splits.train)} rows to train on and {len(splits.held_out)} held out "
            f"({self._readers[TRAIN].columns})"
        )
        self.notes += splits.notes
        return splits

    @cached_property
    def _ids(self) -> dict[str, list[str]]:
        splits = self._splits
        ids = {}
        for split, positions in ((TRAIN, splits.train), (HELD_OUT, splits.held_out)):
            table = self._table(split)
            indices = self._checked[table].indices
            ids[split] = [f"{table}/{indices[position] + 1}" for position in positions]
        return ids

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a text, for reward functions that need them."""
        if self._encoder is None:
            from transformers import AutoTokenizer

            self._encoder = AutoTokenizer.from_pretrained(resolve_model(self._task.model))
        return self._encoder.encode(text, add_special_tokens=False)


def _check_answers(rewards: Sequence[Reward], rows: Rows, reader: Reader) -> None:
    """Raise ValueError if a function needs an answer and the data set has no answers."""
    for reward in rewards:
        if "answer" in reward.signature.required and not reader.has_answers:
            raise ValueError(
                f"{reward.where} needs answer, and {rows.name} has no column of a usual name "
                f"({', '.join(ANSWERS)}): it has {', '.join(rows.columns)}. Set data.answer=COLUMN, or give "
                "the parameter a default."
            )
