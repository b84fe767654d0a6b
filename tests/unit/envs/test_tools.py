"""The tool-use environment: instances with their answers, tools, episodes, and what hostile turns do."""

import ast
import random
from fractions import Fraction

import pytest

from recipes.agent_rl.demonstrators import tool_call
from rlpipe.config.env import EnvConfig, ToolName, ToolsConfig
from rlpipe.envs import check_environment, make_suite
from rlpipe.envs.base import suite_tools
from rlpipe.envs.tools.calculator import calculate, show
from rlpipe.envs.tools.episode import final_answer, same_answer
from rlpipe.envs.tools.generate import FAMILIES, HELD_OUT_FAMILIES, TRAIN_FAMILIES, make_instance
from rlpipe.envs.tools.library import read, search
from rlpipe.envs.tools.schema import ToolCall, ToolError, call_tool, text_tool

pytestmark = pytest.mark.unit


def config(**tools):
    tools.setdefault("names", [ToolName.SEARCH, ToolName.READ, ToolName.CALCULATE])
    return EnvConfig(name="tools", tools=ToolsConfig(**tools))


def play(instance_id, turns, **tools):
    """The steps of an episode that writes these turns."""
    episode = make_suite(config(**tools)).episode(instance_id)
    return [episode.step(turn) for turn in turns]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_follows_from_the_documents_alone(family):
    """An oracle that reads the question's facts out of the text of the documents."""
    for index in range(200):
        one = make_instance(f"{family}:{index}")
        values = []
        for attribute, thing in one.facts:
            homes = [d.text for d in one.documents.values() if d.text.startswith(f"{attribute}\n")]
            (line,) = [x for text in homes for x in text.splitlines() if x.startswith(f"- {thing}: ")]
            values.append(int(line.rpartition(" ")[2]))
            assert f"the {attribute} of {thing}" in one.question
        numbers = [term for term in one.terms if term.isdigit()]
        assert [int(n) for n in numbers][len(numbers) - len(values) :] == values
        assert one.answer == str(eval(" ".join(one.terms)))
        assert make_instance(one.instance_id) == one


def test_a_whole_question_finds_its_document_and_half_of_one_often_does_not():
    missed = 0
    for index in range(300):
        one = make_instance(f"sum:{index}")
        for attribute, thing in one.facts:
            first = search(one.documents, f"{attribute} of {thing}").split(":")[0]
            assert one.documents[first].attribute == attribute and thing in one.documents[first].values
            missed += search(one.documents, thing).split(":")[0] != first
    assert 100 < missed < 500


def test_splits_share_no_question_and_held_out_families_are_never_trained_on():
    suite = make_suite(config(train_size=400, held_out_size=40), seed=3)
    names = ["train", *suite.splits()]
    ids = {split: suite.instance_ids(split) for split in names}
    assert list(map(len, ids.values())) == [400, 40, 40]
    seen = {split: {repr(make_instance(i).documents) for i in ids[split]} for split in names}
    assert not seen["train"] & (seen["held_instances"] | seen["held_families"])
    assert {i.split(":")[0] for i in ids["train"]} == set(TRAIN_FAMILIES)
    assert {i.split(":")[0] for i in ids["held_families"]} == set(HELD_OUT_FAMILIES)
    assert make_suite(config(), seed=4).instance_ids("train")[0] not in ids["train"]
    with pytest.raises(ValueError, match="no split 'test'"):
        suite.instance_ids("test")
    with pytest.raises(ValueError, match="no tool-use instance"):
        make_instance("cube:1")


def test_families_can_be_chosen_and_unknown_ones_are_refused():
    suite = make_suite(config(families=["value", "sum"]))
    for split in ("train", "held_instances"):
        assert {name.split(":")[0] for name in suite.instance_ids(split)} == {"value", "sum"}
    for wrong in ([], ["product"], ["values"]):
        with pytest.raises(ValueError, match=r"env\.tools\.families=.*value, times, sum, difference"):
            make_suite(config(families=wrong))


def test_errors_are_told_to_the_model_and_the_episode_goes_on():
    turns = [
        tool_call("read", document="nowhere"),
        tool_call("reed", document="store"),
        tool_call("read", file="store"),
        tool_call("search", query="zebra"),
        tool_call("python", code="print(1)"),
        '<tool_call>{"name": "read"',
        "no idea",
    ]
    *told, end = play("value:0", turns)
    for step in told:
        assert step.observation.startswith("error: ") and not step.done
    assert "there are search, read, calculate" in told[4].observation
    assert "Additional properties" in told[2].observation or "required" in told[2].observation
    assert end.done and end.reward == 0.0
    assert (end.info["tool_calls"], end.info["tool_errors"], end.info["format_errors"]) == (5, 5, 1)
    assert end.info["family"] == "value" and end.info["submitted"]


def test_calls_of_one_turn_are_answered_in_order_up_to_the_limit():
    (step,) = play("value:0", [tool_call("calculate", expression="1 + 1") * 3], max_calls=2)
    assert step.observation.splitlines()[:2] == ["2", "2"]
    assert "at most 2 calls" in step.observation


def test_running_out_of_turns_earns_nothing():
    end = make_suite(config()).episode("value:0").finish()
    assert end.done and end.reward == 0.0 and end.info["submitted"] is False


def test_schemas_go_to_the_template_or_into_the_system_prompt():
    suite = make_suite(config())
    assert [t["function"]["name"] for t in suite_tools(suite)] == ["search", "read", "calculate"]
    assert [m["role"] for m in suite.episode("value:0").messages()] == ["user"]
    own = make_suite(config(schema="system", parser="pythonic"))
    assert suite_tools(own) is None
    system, _ = own.episode("value:0").messages()
    assert '"name": "calculate"' in system["content"] and "[NAME(ARGUMENT=VALUE)]" in system["content"]


def test_arithmetic_equals_python_on_random_expressions():
    rng = random.Random(0)

    def expression(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.randint(0, 99))
        return f"({expression(depth - 1)} {rng.choice('+-*/')} {expression(depth - 1)})"

    for _ in range(300):
        text = expression(3)
        exact = "".join(f"Fraction({p})" if p.isdigit() else p for p in _pieces(text))
        try:
            wanted = show(Fraction(eval(exact)))
        except ZeroDivisionError:
            with pytest.raises(ToolError, match="division by zero"):
                calculate(text)
            continue
        assert calculate(text) == wanted


def _pieces(text):
    return text.replace("(", " ( ").replace(")", " ) ").split()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "__import__('os').system('id')",
            "9**9**9",
            "'a' * 9",
            "[1]",
            "1 if 1 else 2",
            "x",
            "",
            "1 +",
            *("True", "1or 2"),
        ),
        *("(" * 99, "1" * 201, "*".join(["99999999"] * 20), "1e999", "1j", "1 / 0", "\0"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_arithmetic_is_refused(text):
    with pytest.raises(ToolError, match=r"^calculate: "):
        calculate(text)


def test_the_calculator_walks_a_tree_and_executes_nothing(monkeypatch):
    tree = ast.parse("1+1", mode="eval")
    monkeypatch.setattr("builtins.eval", lambda *_: pytest.fail("eval"))
    monkeypatch.setattr("builtins.exec", lambda *_: pytest.fail("exec"))
    monkeypatch.setattr(ast, "parse", lambda *_, **__: tree)
    assert calculate("1+1") == "2"


def test_a_tool_sees_only_arguments_that_fit_its_schema():
    seen = []
    tool = text_tool("note", "Keep.", {"text": "what"}, lambda text: seen.append(text) or "kept")
    for arguments in ({}, {"text": 1}, {"text": "a", "more": "b"}, {"text": None}):
        with pytest.raises(ToolError, match=r"^note: "):
            call_tool([tool], ToolCall(name="note", arguments=arguments))
    assert seen == []
    assert call_tool([tool], ToolCall(name="note", arguments={"text": "a"})) == "kept" and seen == ["a"]


@pytest.mark.parametrize(
    ("answer", "wanted", "same"),
    [
        *(
            ("12", "12", True),
            ("12.0", "12", True),
            ("-4", "-4", True),
            ("١٢", "12", False),
            ("1_2", "12", False),
        ),
        *(("1 2", "12", False), ("", "12", False), ("nan", "12", False), ("12 kg", "12", False)),
    ],
)
def test_answers_are_compared_as_numbers(answer, wanted, same):
    assert same_answer(final_answer(answer), wanted) is same


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"names": []}, "at least one tool"),
        ({"names": [ToolName.READ, ToolName.READ]}, "each once"),
        ({"max_calls": 0}, "max_calls=0 must be at least 1"),
        ({"train_size": 2_000_000}, "at most 1000000"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        ToolsConfig(**settings)


def test_python_without_its_sandbox_is_refused_at_launch():
    bad = config(names=list(ToolName))
    bad.sandbox.backend = type(bad.sandbox.backend)("docker")
    with pytest.raises(ValueError, match="runs under bubblewrap"):
        check_environment(bad)
    check_environment(config())


def test_reading_names_what_is_not_there():
    with pytest.raises(ToolError, match="no document 'x"):
        read({}, "x" * 500)
