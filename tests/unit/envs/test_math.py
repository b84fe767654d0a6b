"""Reasoning tasks: the right answer scores, training never shows a held-out question."""

import re

import pytest

from rlpipe.config.env import EnvConfig, EnvName, ReasoningConfig
from rlpipe.envs import check_environment, make_suite
from rlpipe.envs.base import train_stages
from rlpipe.loop.prompts import PromptStream

pytestmark = pytest.mark.unit


def config(**settings):
    reasoning = {"tasks": ["chain_sum", "gcd"], "train_size": 50, "held_out_size": 20} | settings
    return EnvConfig(name=EnvName.REASONING, reasoning=ReasoningConfig(**reasoning))


def question(suite, instance_id):
    return suite.episode(instance_id).messages()[-1]["content"]


def play(suite, instance_id, text):
    return suite.episode(instance_id).step(text)


def test_the_oracles_answer_scores_one_and_others_do_not():
    suite = make_suite(config())
    import reasoning_gym

    for instance_id in suite.instance_ids("held_out")[:10]:
        task, index = instance_id.split(":")
        answer = reasoning_gym.create_dataset(task, size=1, seed=int(index))[0]["answer"]
        step = play(suite, instance_id, f"thinking <answer>wrong</answer> no: <answer> {answer} </answer>")
        assert step.done and step.reward == 1.0 and step.info["submitted"] and step.info["family"] == task
        assert play(suite, instance_id, "<answer>no idea</answer>").reward < 0.5
        unmarked = play(suite, instance_id, f"it is {answer}")
        assert unmarked.reward == 0.0 and not unmarked.info["submitted"]
        assert suite.episode(instance_id).finish().reward == 0.0


def test_an_answer_the_librarys_scorer_cannot_read_scores_zero_and_is_recorded():
    suite = make_suite(config(tasks=["prime_factorization"]))
    instance_id = suite.instance_ids("held_out")[0]
    step = play(suite, instance_id, "<answer>two times three</answer>")
    assert step.reward == 0.0 and step.info["submitted"] and "ValueError" in step.info["unreadable"]


def test_messages_ask_for_answer_tags_and_show_the_question():
    system, user = make_suite(config()).episode("gcd:3").messages()
    assert system["role"] == "system" and "<answer>" in system["content"]
    assert user["role"] == "user" and "Greatest Common Divisor" in user["content"]


def test_ids_name_the_same_question_in_every_process_and_held_out_sets_do_not_depend_on_the_seed():
    one, again, other = make_suite(config(), 1), make_suite(config(), 1), make_suite(config(), 2)
    assert one.instance_ids("train") == again.instance_ids("train")
    assert one.instance_ids("held_out") == other.instance_ids("held_out")
    assert not set(one.instance_ids("train")) & set(other.instance_ids("train"))
    name = one.instance_ids("train")[0]
    assert question(one, name) == question(again, name)
    assert list(one.splits()) == ["held_out"] and one.max_turns == 1


def test_no_training_question_is_held_out():
    small = config(tasks=["gcd"], train_size=4000, held_out_size=300)
    suite = make_suite(small)
    held = {question(suite, name) for name in suite.instance_ids("held_out")}
    train = suite.instance_ids("train")
    assert len(train) < 4000, "this test needs a task whose questions repeat"
    assert not held & {question(suite, name) for name in train}


def test_an_unknown_task_is_refused_with_similar_names():
    with pytest.raises(ValueError, match=r"no data set 'chain_summ'.*chain_sum"):
        check_environment(config(tasks=["chain_summ"]))


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="no split 'test'; there are train, held_out"):
        make_suite(config()).instance_ids("test")


def test_parameters_of_a_data_set_decide_its_questions_in_both_splits():
    two_terms = {"chain_sum": {"min_terms": 2, "max_terms": 2}}
    suite = make_suite(config(tasks=["chain_sum"], train_size=5, options=two_terms))
    for split in ("train", "held_out"):
        for instance in suite.instance_ids(split)[:5]:
            assert len(re.findall(r"\d [+-] \d", question(suite, instance))) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chain_sum": {"max_term": 2}}, "chain_sum has no parameter 'max_term'. Did you mean max_terms?"),
        ({"chain_sum": {"seed": 2}}, "options.chain_sum has no parameter 'seed'"),
        ({"chain_sum": {"min_terms": 5, "max_terms": 2}}, "reasoning-gym refuses it"),
        ({"chain_sum": {"min_terms": "two"}}, "reasoning-gym refuses it"),
        ({"chain_sum": 2}, "env.reasoning.options.chain_sum=2: give parameters by task"),
        ({"lcm": {"min_numbers": 2}}, "options.lcm={'min_numbers': 2}: give parameters by task"),
    ],
)
def test_wrong_parameters_of_a_data_set_are_refused_with_task_and_hint(options, says):
    with pytest.raises(ValueError) as refused:
        check_environment(config(tasks=["chain_sum"], options=options))
    assert says in str(refused.value)


def test_a_curriculum_is_trained_level_by_level_and_measured_at_each():
    suite = make_suite(config(tasks=["chain_sum"], train_size=20, held_out_size=5, levels=[0, 4]))
    easy, hard = train_stages(suite)
    assert list(suite.splits()) == ["level_4", "level_0"] and len(easy) == len(hard) == 20

    # Level 0 has two numbers of one digit; level 4 up to six, of up to five.
    assert all(len(re.findall(r"\d+", question(suite, name))) == 2 for name in easy)
    assert max(len(re.findall(r"\d+", question(suite, name))) for name in hard) > 3
    held = {question(suite, name) for split in suite.splits() for name in suite.instance_ids(split)}
    assert not held & {question(suite, name) for name in suite.instance_ids("train")}

    # Prompts of a run go through the levels, and each is solved by its own answer.
    stream = PromptStream.of_stages([easy, hard], seed=3)
    first = [stream.instance(n) for n in range(len(easy) + len(hard))]
    assert sorted(first[: len(easy)]) == sorted(easy) and first[: len(easy)] != easy


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tasks": ["chain_sum"], "levels": [-1]}, "levels=[-1]: give different levels from 0"),
        ({"tasks": ["chain_sum"], "levels": [1, 1]}, "levels=[1, 1]: give different levels"),
        ({"tasks": ["chain_sum"], "levels": [99]}, "has 99, but the curriculum of chain_sum ends at 10."),
        ({"tasks": ["acre"], "levels": [0]}, "acre has no curriculum: set its difficulty by"),
        ({"tasks": ["knight_swap"], "levels": [0]}, "reasoning-gym refuses for knight_swap: min_nodes"),
    ],
)
def test_a_level_that_does_not_exist_is_refused_with_what_there_is(settings, says):
    with pytest.raises(ValueError) as refused:
        check_environment(config(**settings))
    assert says in str(refused.value)


def test_a_data_set_without_rules_of_its_own_is_accepted():
    check_environment(config(tasks=["power_function"]))
