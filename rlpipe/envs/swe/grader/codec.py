"""Values between the tests and the code under test: JSON with tags, decoded into exact builtin types only.

    [1, "a"]  <->  ["list", [1, "a"]]          2.5  <->  ["float", "0x1.4p+1"]

Owns the format of messages and their limits. Decoding calls only constructors of builtin types, so no message
can run code; a subclass of a builtin type is sent as a value of that builtin type. This module runs inside
the sandboxes. It imports almost nothing, because imports are most of the cost of grading: importing the
package json takes longer than parsing all messages.
"""

import os
from _json import make_scanner

LONGEST = 4 << 20  # maximum bytes of one message
_DEEPEST = 60
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)


class Malformed(ValueError):
    """Raised for a message that violates the format or its limits."""


def encode(value, other, depth=0):
    """Return the JSON form of a value. other: function that converts objects of types that are not builtin.

    Raises Malformed for values that are nested too deeply.
    """
    if depth > _DEEPEST:
        raise Malformed("nested too deeply")
    if value is None:
        return None
    kind = next((k for k in _PLAIN if isinstance(value, k)), None)
    if kind is bool:
        return value
    if kind is int:
        return (
            int.__int__(value)
            if -(1 << 53) < int.__int__(value) < 1 << 53
            else ["int", hex(int.__int__(value))]
        )
    if kind is float:
        return ["float", float.hex(value)]
    if kind is complex:
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if kind is str:
        return str.__str__(value)
    if kind is bytes or kind is bytearray:
        return [kind.__name__, kind.hex(value)]
    if kind is dict:
        pairs = dict.items(value)
        return ["dict", [[encode(k, other, depth + 1), encode(v, other, depth + 1)] for k, v in pairs]]
    if kind is not None:
        return [kind.__name__, [encode(item, other, depth + 1) for item in kind.__iter__(value)]]
    return other(value)


def decode(form, other, depth=0):
    """Return the value of a JSON form. other: function that decodes unknown tags. Raises Malformed."""
    if depth > _DEEPEST:
        raise Malformed("nested too deeply")
    if form is None or type(form) in (bool, int, str):
        return form
    if type(form) is not list or not form or type(form[0]) is not str:
        raise Malformed(f"no value: {form!r:.80}")
    tag, *rest = form
    try:
        if tag == "int":
            return int(*rest, 16)
        if tag == "float":
            return float.fromhex(*rest)
        if tag == "complex":
            return complex(*map(float.fromhex, rest))
        if tag in ("bytes", "bytearray"):
            return {"bytes": bytes, "bytearray": bytearray}[tag].fromhex(*rest)
        if tag in _CONTAINERS:
            (items,) = rest
            return _CONTAINERS[tag](decode(item, other, depth + 1) for item in items)
        if tag == "dict":
            (pairs,) = rest
            return {decode(k, other, depth + 1): decode(v, other, depth + 1) for k, v in pairs}
    except Malformed:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise Malformed(f"no {tag}: {error!s:.80}") from error
    return other(form)


_ESCAPES = {n: f"\\u{n:04x}" for n in (*range(32), ord('"'), ord("\\"))}


def dumps(form):
    """Serialise a result of `encode` (None, bool, int, str and lists of these) as JSON in UTF-8."""
    return _text(form).encode("utf-8", "surrogatepass")


def _text(form):
    if form is None:
        return "null"
    if type(form) is str:
        return f'"{form.translate(_ESCAPES)}"'
    if type(form) is list:
        return f"[{','.join(map(_text, form))}]"
    return {True: "true", False: "false"}[form] if type(form) is bool else repr(form)


class _Reading:
    """Options of Python's JSON scanner. It may parse a float, which `decode` then rejects."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_int, parse_float, parse_constant = int, float, float


def loads(data):
    """Parse JSON in UTF-8. Raises ValueError if it is invalid, RecursionError if it is nested too deeply.

    >>> loads(dumps(["a", [True, None]]))
    ['a', [True, None]]
    """
    text = data.decode("utf-8", "surrogatepass")
    try:
        value, end = make_scanner(_Reading)(text, 0)
    except StopIteration:
        end = -1
    if end != len(text):
        raise ValueError(f"not one value: {text:.80}")
    return value


_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Channel:
    """Sends and receives messages over a socket's descriptor; a message is its length (four bytes) and text.

    dumps, loads: convert a message to bytes and back; `loads` may raise ValueError or RecursionError.
    Raises Malformed for an invalid message, EOFError or OSError if the socket is closed or fails.
    """

    def __init__(self, descriptor, dumps, loads):
        self._descriptor, self._dumps, self._loads = descriptor, dumps, loads

    def send(self, message):
        """Write a message."""
        text = self._dumps(message)
        if len(text) > LONGEST:
            raise Malformed(f"a message of {len(text)} bytes, at most {LONGEST} are sent")
        data = memoryview(len(text).to_bytes(4, "big") + text)
        while data:
            data = data[os.write(self._descriptor, data) :]

    def receive(self):
        """Wait for the next message and return it."""
        size = int.from_bytes(self._read(4), "big")
        if size > LONGEST:
            raise Malformed(f"a message of more than {LONGEST} bytes")
        text = self._read(size)
        try:
            return self._loads(text)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"not JSON: {error!s:.80}") from error

    def _read(self, size):
        parts = []
        while size:
            parts.append(os.read(self._descriptor, min(size, 1 << 16)))
            if not parts[-1]:
                raise EOFError("the other side is gone")
            size -= len(parts[-1])
        return b"".join(parts)
