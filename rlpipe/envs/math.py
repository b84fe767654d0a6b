"""Single-turn reasoning tasks from reasoning-gym: one question, one answer, one score.

Owns the set of questions. The instance "task:index" is a question of the data set `task`, made with seed
`index`; "task@level:index" is a question at a level of the task's curriculum. Held-out indices start at 0 for
every seed of the run, training indices at (1 + seed) million. A training question that is also held out is
skipped. The reward is the library's score, 0..1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from rlpipe.config.env import INDEX_STRIDE, EnvConfig
from rlpipe.config.limits import did_you_mean
from rlpipe.envs.base import TRAIN, SplitTable, StepResult


def check_reasoning(config: EnvConfig) -> None:
    """Raise ValueError for a task, a parameter or a level that reasoning-gym does not have."""
    from reasoning_gym.factory import DATASETS

    for task in config.reasoning.tasks:
        if task not in DATASETS:
            # For a misspelt name, suggest names that share a word with it.
            similar = [name for name in sorted(DATASETS) if set(task.split("_")) & set(name.split("_"))]
            raise ValueError(
                f"env.reasoning.tasks: reasoning-gym has no data set {task!r}. "
                f"Similar: {', '.join(similar[:8]) or 'none'}; in all {len(DATASETS)}."
            )
        options = config.reasoning.options.get(task, {})
        _check_options(task, options, DATASETS[task][1])
        for level in config.reasoning.levels:
            _check_level(task, options, level)


def _check_options(task: str, options: Mapping[str, Any], config_class: Any) -> None:
    """Check the parameters of a task against the fields and the `validate` method of its config class."""
    where = f"env.reasoning.options.{task}"
    known = [field.name for field in fields(config_class) if field.name not in ("size", "seed")]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or f" There are {', '.join(known)}."
            raise ValueError(f"{where} has no parameter {name!r}.{hint}")
    try:
        _validate(config_class(**options))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{where}={dict(options)}: reasoning-gym refuses it: {error}.") from error


def _check_level(task: str, options: Mapping[str, Any], level: int) -> None:
    """Check that the curriculum of a task has this level, and that the level generates questions."""
    from reasoning_gym.factory import CURRICULA, create_curriculum

    where = f"env.reasoning.levels has {level}"
    if task not in CURRICULA:
        raise ValueError(
            f"{where}, but {task} has no curriculum: set its difficulty by env.reasoning.options.{task}, or "
            "leave it out of env.reasoning.tasks."
        )

    highest = max(len(attribute.levels) for attribute in create_curriculum(task).attributes.values()) - 1
    if level > highest:
        raise ValueError(f"{where}, but the curriculum of {task} ends at {highest}.")
    try:
        _validate(_at_level(task, options, level))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{where}, which reasoning-gym refuses for {task}: {error}.") from error


def _validate(config: Any) -> None:
    """Call `validate` of a data set's config; three configs of the library have no such method."""
    if hasattr(config, "validate"):
        config.validate()


def _at_level(task: str, options: Mapping[str, Any], level: int) -> Any:
    """Return the settings of a task at a curriculum level.

    options: values of the settings that the level does not set.
    """
    from reasoning_gym.factory import create_curriculum

    curriculum = create_curriculum(task)
    curriculum.set_global_level(level)
    return curriculum.generate_configuration(dict(options))


class MathEpisode:
    """An episode whose first action is the answer."""

    def __init__(self, instance_id: str, system_prompt: str, options: Mapping[str, Any]) -> None:
        self._dataset, self._entry = _generate(instance_id, options)
        self._task = instance_id.split(":")[0]  # includes the level: each level has separate metrics
        self._system_prompt = system_prompt

    def messages(self) -> list[dict[str, str]]:
        """Return the system prompt, which requires <answer> tags, and the question."""
        return [
            {"role": "system", "content": self._system_prompt},
            {"role": "user", "content": self._entry["question"]},
        ]

    def step(self, action: str) -> StepResult:
        """Score the last <answer>...</answer> of the text; a text without one scores 0.

        Some of the library's scorers raise on an answer that they cannot parse; the score is then 0, and the
        error is recorded.
        """
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(action)
        if answer is None:
            return self._end(0.0, submitted=False)

        info = {"submitted": True, "answer": answer[:200]}
        try:
            score = float(self._dataset.score_answer(answer, self._entry))
        except Exception as error:  # scorers raise many kinds of errors
            score, info["unreadable"] = 0.0, repr(error)[:200]

        return self._end(score, **info)

    def finish(self) -> StepResult:
        """End the episode without an answer, for reward 0."""
        return self._end(0.0, submitted=False)

    def _end(self, reward: float, **info: object) -> StepResult:
        return StepResult(done=True, reward=reward, info=info | {"family": self._task})

    def close(self) -> None:
        """Do nothing: an episode holds no resources."""


class MathSuite(SplitTable):
    """A suite of procedural tasks. Splits: `train` and `held_out`; tasks alternate in both.

    With levels there is a held-out set for each level, the highest first, and training goes through the
    levels in order (`train_stages`).
    """

    max_turns = 1

    def __init__(self, config: EnvConfig, seed: int) -> None:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        check_reasoning(config)

        settings = config.reasoning
        self._options = settings.options
        self._system_prompt = config.system_prompt or SYSTEM_PROMPTS["default"]

        first = (1 + seed) * INDEX_STRIDE
        train_indices = range(first, first + settings.train_size)
        held_out: dict[str, list[str]] = {}
        stages: list[list[str]] = []
        for level in settings.levels or [None]:
            names = settings.tasks if level is None else [f"{task}@{level}" for task in settings.tasks]
            split = "held_out" if level is None else f"level_{level}"
            held_out[split] = _ids(names, range(settings.held_out_size))
            stages.append(_ids(names, train_indices))

        # Tasks with few variants repeat a question for several seeds. Do not train on a held-out question.
        questions = {self._question(name) for names in held_out.values() for name in names}
        self._stages = [[name for name in stage if self._question(name) not in questions] for stage in stages]
        for stage, split in zip(self._stages, held_out, strict=True):
            if not stage:
                raise ValueError(
                    f"env.reasoning.tasks={settings.tasks} have no training question that is not held out "
                    f"({split}): lower env.reasoning.held_out_size or choose tasks with more variety."
                )

        # The hardest held-out set comes first, so that it is the primary one.
        train = [name for stage in self._stages for name in stage]
        super().__init__({TRAIN: train} | dict(reversed(held_out.items())))

    def train_stages(self) -> list[list[str]]:
        """Return the training instances of each level, in the order of training."""
        return self._stages

    def _question(self, instance_id: str) -> str:
        return _generate(instance_id, self._options)[1]["question"]

    def episode(self, instance_id: str) -> MathEpisode:
        """Start a fresh attempt."""
        return MathEpisode(instance_id, self._system_prompt, self._options)


def _ids(tasks: Sequence[str], indices: range) -> list[str]:
    return [f"{task}:{index}" for index in indices for task in tasks]


def _generate(instance_id: str, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a data set with one item, and that item. options: parameters of the data sets, by task."""
    from reasoning_gym import create_dataset

    name, index = instance_id.split(":")
    task, _, level = name.partition("@")

    parameters = dict(options.get(task, {}))
    if level:
        parameters = asdict(_at_level(task, parameters, int(level)))
    dataset = create_dataset(task, **{**parameters, "size": 1, "seed": int(index)})
    return dataset, dataset[0]
