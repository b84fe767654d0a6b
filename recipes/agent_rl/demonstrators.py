"""Traces of demonstrators of mixed quality, in the format of the hermes parser.

This module defines what each demonstrator writes. The real tools compute the results, so a trace shows what
the environment would have shown. The model of this recipe imitates these traces.
"""

from __future__ import annotations

import json
import random
from enum import StrEnum

from rlpipe.config.env import ToolName, ToolParser
from rlpipe.envs.tools.generate import Fact, Instance
from rlpipe.envs.tools.library import make_tools, search
from rlpipe.envs.tools.parsers import MalformedCall, parse_turn
from rlpipe.envs.tools.schema import ToolError, call_tool

Messages = list[dict[str, str]]
NAMES = (ToolName.SEARCH, ToolName.READ, ToolName.CALCULATE, ToolName.PYTHON)


class Demonstrator(StrEnum):
    """A way to work on a question."""

    CAREFUL = "careful"  # search, read, for each fact; calculate; answer
    PROGRAMMER = "programmer"  # the same, computing with a Python program
    RETRY = "retry"  # a malformed call first, then like CAREFUL
    HASTY = "hasty"  # searches for half of the question and reads the first result
    IN_THE_HEAD = "in_the_head"  # reads everything and guesses the result
    AT_ONCE = "at_once"  # guesses without looking


def tool_call(name: str, **arguments: str) -> str:
    """Return a call as text.

    >>> tool_call("read", document="store")
    '<tool_call>{"name": "read", "arguments": {"document": "store"}}</tool_call>'
    """
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def demonstrate(rng: random.Random, instance: Instance, who: Demonstrator) -> Messages:
    """Return the conversation of one demonstrator with an instance, from the question to the answer."""
    messages = [{"role": "user", "content": instance.question}]
    if who is Demonstrator.AT_ONCE:
        return [*messages, _said(str(rng.randint(2, 99)))]
    if who is Demonstrator.RETRY:
        whole = _search(instance.facts[0])
        _act(messages, instance, rng.choice([whole.replace("}}", "}"), whole.replace("</tool_call>", "")]))
    values = []
    for fact in instance.facts:
        half = who is Demonstrator.HASTY and rng.random() < 0.8
        query = rng.choice(fact) if half else f"{fact[0]} of {fact[1]}"
        _act(messages, instance, tool_call("search", query=query))
        document = search(instance.documents, query).split(":")[0]
        _act(messages, instance, tool_call("read", document=document))
        found = instance.documents[document].values
        values.append(found.get(fact[1], next(iter(found.values()))))
    terms = _terms(instance, values)
    if len(terms) == 1:
        return [*messages, _said(terms[0])]
    if who is Demonstrator.IN_THE_HEAD:
        return [*messages, _said(str(rng.randint(2, 199)))]
    if who is Demonstrator.PROGRAMMER:
        _act(messages, instance, tool_call("python", code=f"print({' '.join(terms)})"))
    else:
        _act(messages, instance, tool_call("calculate", expression=" ".join(terms)))
    return [*messages, _said(messages[-1]["content"])]


def _terms(instance: Instance, values: list[int]) -> list[str]:
    """Return the expression with its last numbers replaced by the values that were read."""
    numbers = range(0, len(instance.terms), 2)
    terms = list(instance.terms)
    for place, value in zip(numbers[len(numbers) - len(values) :], values, strict=True):
        terms[place] = str(value)
    return terms


def _search(fact: Fact) -> str:
    return tool_call("search", query=f"{fact[0]} of {fact[1]}")


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _act(messages: Messages, instance: Instance, action: str) -> None:
    """Return a turn and the environment's reply. Python runs in this process (tested against the sandbox)."""
    try:
        (call,) = parse_turn(action, ToolParser.HERMES).calls
        if call.name == ToolName.PYTHON:
            call = type(call)(name="calculate", arguments={"expression": call.arguments["code"][6:-1]})
        shown = call_tool(make_tools(NAMES, instance.documents, None), call)
    except (MalformedCall, ToolError) as error:
        shown = f"error: {error}"
    messages += [_said(action), {"role": "tool", "content": shown}]
