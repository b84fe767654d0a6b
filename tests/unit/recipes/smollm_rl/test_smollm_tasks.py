"""The tasks of smollm_rl: disjoint prompts, right answers that pass and degenerate ones that do not."""

from __future__ import annotations

import random

import pytest

from recipes.smollm_rl.prompts import UNSCORED
from recipes.smollm_rl.suite import ALL_TASKS, Suite, make_suite
from recipes.smollm_rl.tasks import TASKS, TOPICS, WORDS, data_of, is_sentence, sides
from rlpipe.cli.run import config_of
from rlpipe.envs.base import TRAIN

pytestmark = pytest.mark.unit

START = data_of(
    "Write one sentence about winter. The sentence must start with the letter T.", topic="winter", letter="T"
)
SHORT = data_of("Tell me about winter in one short sentence of at most ten words.", topic="winter")
KEYWORDS = data_of(
    "Write one short sentence that contains the words 'candle' and 'kitchen'.", words=["candle", "kitchen"]
)
LARGEST = data_of("Which number is the largest: 874, 404 or 437?", largest=874)


@pytest.mark.parametrize(
    ("task", "data", "answer"),
    [
        ("start", START, "The first snow of winter covered our little village."),
        ("start", START, '"Though it is cold, winter has its charm."'),
        ("short", SHORT, "Winter is a cold and dark season."),
        ("short", SHORT, "In winter, many animals sleep until spring!"),
        ("keywords", KEYWORDS, "She lit a candle in the kitchen when it got dark."),
        ("largest", LARGEST, "The largest number is 874."),
        ("largest", LARGEST, "874"),
    ],
)
def test_right_answers_pass(task, data, answer) -> None:
    assert TASKS[task].score(data, answer) == 1.0


@pytest.mark.parametrize(
    ("task", "data", "answer"),
    [
        ("start", START, "NNN NNN NNN"),
        ("start", START, "TTT winter TTT is TTT."),
        ("start", START, "The winter the winter the winter is the winter."),
        ("start", START, "Write one sentence about winter."),
        ("start", START, "The sentence must start with the letter T about winter."),
        ("start", START, "Winter is a cold and dark season."),
        ("start", START, "The first snow of winter covered\nour little village."),
        ("start", START, "The first snow of winter covered our"),
        ("short", SHORT, "Winter in one sentence."),
        ("short", SHORT, "Winter winter winter winter."),
        ("short", SHORT, "Winter."),
        ("short", SHORT, "Winter snow ice cold dark."),
        ("short", SHORT, "Winter is a season in which the days are short and it is often very cold."),
        ("short", SHORT, "It is a season of cold."),
        ("keywords", KEYWORDS, "A candle is a candle and a kitchen is a kitchen."),
        ("keywords", KEYWORDS, "A candle is a candle and a kitchen is bright."),
        ("keywords", KEYWORDS, "The words 'candle' and 'kitchen'."),
        ("keywords", KEYWORDS, "The candle was in the room of the house."),
        ("keywords", KEYWORDS, ""),
        ("largest", LARGEST, "404"),
        ("largest", LARGEST, "Which number is the largest: 404, 437 or 874?"),
        ("largest", LARGEST, "874 874 404"),
        ("largest", LARGEST, "The largest."),
    ],
)
def test_wrong_and_degenerate_answers_fail(task, data, answer) -> None:
    assert TASKS[task].score(data, answer) == 0.0


@pytest.mark.parametrize("name", ALL_TASKS)
def test_training_and_held_out_prompts_share_no_text(name) -> None:
    task = ALL_TASKS[name]
    sides = [
        {task.make(random.Random(seed), held_out=held_out)[0] for seed in range(500)}
        for held_out in (False, True)
    ]
    assert not sides[0] & sides[1]
    assert all(sides)


@pytest.mark.parametrize(("name", "subjects"), [("start", TOPICS), ("short", TOPICS), ("keywords", WORDS)])
def test_held_out_topics_and_words_are_in_no_training_prompt(name, subjects) -> None:
    for held_out in (False, True):
        prompts = [prompt for prompt, _ in TASKS[name].examples(100, held_out=held_out)]
        other_side = sides(subjects)[not held_out]
        assert not any(
            f" {subject} " in prompt.replace(".", " ") for subject in other_side for prompt in prompts
        )
        assert not any(f"'{subject}'" in prompt for subject in other_side for prompt in prompts)


@pytest.mark.parametrize("name", TASKS)
def test_examples_are_distinct_and_the_same_for_the_same_arguments(name) -> None:
    examples = TASKS[name].examples(100, held_out=True)
    assert len({prompt for prompt, _ in examples}) == 100
    assert examples == TASKS[name].examples(100, held_out=True)
    assert examples != TASKS[name].examples(100, held_out=True, seed=1)


@pytest.mark.parametrize("name", ["start", "short", "keywords"])
def test_copying_the_prompt_earns_nothing(name) -> None:
    for prompt, data in TASKS[name].examples(100):
        assert TASKS[name].score(data, prompt) == 0.0


def test_more_prompts_than_a_task_has_are_refused() -> None:
    with pytest.raises(ValueError, match="use fewer"):
        TASKS["short"].examples(10_000)


def test_a_sentence_may_repeat_short_words_but_not_long_ones() -> None:
    assert is_sentence("The king of the island sat on the throne.", "")
    assert not is_sentence("The island is an island in the sea.", "")


def test_suite_has_a_held_out_set_of_each_task_and_trains_on_all_in_turn() -> None:
    suite = Suite(["start", "largest", "chat"], ["html"], train=5, held_out=3)
    assert list(suite.splits()) == ["start", "largest", "chat", "html"]
    train = suite.instance_ids(TRAIN)
    assert [name.split(".")[0] for name in train[:4]] == ["start", "largest", "chat", "start"]
    assert len(train) == 15

    prompts = [suite.episode(name).messages()[0]["content"] for name in train]
    held_out = [
        suite.episode(n).messages()[0]["content"] for s in suite.splits() for n in suite.instance_ids(s)
    ]
    assert not set(prompts) & set(held_out)


def test_suite_scores_answers_and_refuses_unknown_tasks() -> None:
    suite = Suite(["largest", "chat"], train=2, held_out=2)
    name = suite.instance_ids("largest")[0]
    largest = max(int(x) for x in words_and_numbers(suite.episode(name).messages()[0]["content"]))
    assert suite.episode(name).step(f"It is {largest}.").reward == 1.0
    assert suite.episode(suite.instance_ids("chat")[0]).step("Anything.").reward == 0.0
    with pytest.raises(ValueError, match="lagest"):
        Suite(["lagest"], train=2, held_out=2)


def words_and_numbers(text: str) -> list[str]:
    return [part.strip(",:?") for part in text.split() if part.strip(",:?").isdigit()]


def test_unscored_prompts_never_earn() -> None:
    for task in UNSCORED.values():
        for prompt, data in task.examples(10):
            assert task.score(data, prompt) == 0.0


@pytest.mark.parametrize("recipe", ["smollm_rl", "smollm_adapt"])
def test_the_recipes_ask_for_no_more_prompts_than_there_are(recipe) -> None:
    config, _ = config_of([f"+recipe={recipe}"])
    suite = make_suite(config.env, 0)
    assert min(len(suite.instance_ids(name)) for name in suite.splits()) >= config.adapt.eval_prompts
