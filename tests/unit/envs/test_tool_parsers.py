"""Tool calls are read strictly: what a model writes is a call, an answer, or a malformed call."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.agent_rl.demonstrators import tool_call
from rlpipe.config.env import ToolParser
from rlpipe.envs.tools.parsers import LONGEST_TURN, MalformedCall, parse_turn
from rlpipe.envs.tools.schema import ToolCall

pytestmark = pytest.mark.unit
READ = ToolCall(name="read", arguments={"document": "store"})
SAME = {
    ToolParser.HERMES: '<tool_call>\n{"name": "read", "arguments": {"document": "store"}}\n</tool_call>',
    ToolParser.JSON: '{"name": "read", "parameters": {"document": "store"}}',
    ToolParser.PYTHONIC: '[read(document="store")]',
}


@pytest.mark.parametrize("parser", list(ToolParser))
def test_each_format_says_the_same_call(parser):
    assert parse_turn(SAME[parser], parser).calls == (READ,)
    assert parse_turn(" 42 ", parser) == parse_turn("42", parser)
    assert parse_turn("42", parser).calls == () and parse_turn("42", parser).content == "42"


def test_a_turn_may_reason_and_call_several_tools():
    turn = parse_turn(f"First.{SAME['hermes']}Then.{SAME['hermes']}", ToolParser.HERMES)
    assert turn.calls == (READ, READ) and turn.content == "First.Then."
    pair = '[read(document="store"), calculate(expression="-1")]'
    assert [c.name for c in parse_turn(pair, ToolParser.PYTHONIC).calls] == ["read", "calculate"]


@pytest.mark.parametrize(
    ("text", "parser"),
    [
        ('<tool_call>{"name": "read", "arguments": {}}', "hermes"),
        ('{"name": "read", "arguments": {}}</tool_call>', "hermes"),
        ('<tool_call>{"name": "read", "arguments": {}</tool_call>', "hermes"),
        ("<tool_call></tool_call>", "hermes"),
        ('<tool_call>{"name": "read"}</tool_call>', "hermes"),
        ('<tool_call>{"name": "read", "arguments": {}, "x": 1}</tool_call>', "hermes"),
        ('<tool_call>{"name": "read", "arguments": "{}"}</tool_call>', "hermes"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "hermes"),
        ('<tool_call>["read"]</tool_call>', "hermes"),
        ('<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "hermes"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "hermes"),
        (f"<tool_call>{'[' * 9000}</tool_call>", "hermes"),
        ("4" * (LONGEST_TURN + 1), "hermes"),
        ('{"name": "read", "arguments": {}} and more', "json"),
        ('{"name": "read", "arguments": {}, "parameters": {}}', "json"),
        ("[]", "pythonic"),
        (f"[calculate(expression=0x{'f' * 5000})]", "pythonic"),  # more digits than Python shows
        ("[calculate(expression=1_2)]", "pythonic"),
        ("[calculate(expression=\u0661)]", "pythonic"),
        ("[read(", "pythonic"),
        ('[read("store")]', "pythonic"),
        ("[read(**{})]", "pythonic"),
        ('[read(document="a", document="b")]', "pythonic"),
        ('[read(document=open("/etc/passwd"))]', "pythonic"),
        ('[__import__("os").system(command="id")]', "pythonic"),
        (f"[read(document={'(' * 3000}1{')' * 3000})]", "pythonic"),
        (f"[read(document={'-' * 9000}1)]", "pythonic"),
    ],
)
def test_what_is_nearly_a_call_is_malformed(text, parser):
    with pytest.raises(MalformedCall):
        parse_turn(text, ToolParser(parser))


@settings(max_examples=60, deadline=None)
@given(st.text(), st.sampled_from(list(ToolParser)))
def test_any_text_is_read_or_refused(text, parser):
    for whole in (text, f"<tool_call>{text}</tool_call>", f"[{text}]", f"{{{text}}}"):
        try:
            turn = parse_turn(whole, parser)
        except MalformedCall:
            continue
        assert all(isinstance(call.arguments, dict) for call in turn.calls)


@settings(max_examples=60, deadline=None)
@given(st.text(), st.dictionaries(st.text(min_size=1), st.text(), max_size=3))
def test_a_call_that_was_written_is_read_again(name, arguments):
    if "</tool_call>" in name + "".join([*arguments, *arguments.values()]):
        return
    call = '<tool_call>{"name": %s, "arguments": %s}</tool_call>'
    turn = parse_turn(call % (json.dumps(name), json.dumps(arguments)), ToolParser.HERMES)
    assert turn.calls == (ToolCall(name=name, arguments=arguments),)
    assert parse_turn(tool_call("read", document="store"), ToolParser.HERMES).calls == (READ,)
