"""Serves the code under test to tests in another process; only this process imports the model's code.

Owns the objects of that code. Answers requests over a socket (see `proxy`) until the socket is closed. It has
no tests, test ids or results. This process is not trusted, so its answers are JSON and are decoded strictly.
Requests come from a trusted process and are decoded with marshal.
"""

import importlib
import marshal
import os
import sys
import types

from rlpipe.envs.swe.grader import late
from rlpipe.envs.swe.grader.codec import Channel, Malformed, decode, dumps, encode

_EXPORTED = (type, types.FunctionType)
_OPERATIONS = {
    "str": str,
    "repr": repr,
    "bool": bool,
    "len": len,
    "iter": iter,
    "next": next,
    "hash": hash,
    "isinstance": lambda cls, value: isinstance(value, cls),
    "eq": lambda a, b: bool(a == b),
    "lt": lambda a, b: bool(a < b),
    "le": lambda a, b: bool(a <= b),
    "gt": lambda a, b: bool(a > b),
    "ge": lambda a, b: bool(a >= b),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "neg": lambda a: -a,
    "getitem": lambda a, key: a[key],
    "setitem": lambda a, key, value: a.__setitem__(key, value),
    "delitem": lambda a, key: a.__delitem__(key),
    "enter": lambda a: type(a).__enter__(a),
    "exit": lambda a: type(a).__exit__(a, None, None, None),
    "getattr": lambda a, name: getattr(a, name),
    "setattr": setattr,
    "delattr": delattr,
}


class Objects:
    """The objects sent to the tests, by number; objects and numbers persist until the process ends."""

    def __init__(self):
        self._objects, self._numbers, self._exported = [], {}, []

    def export(self, module, names):
        """Return the functions and classes among the names of a module; the tests request each only once."""
        space = vars(module)
        exported = {name: space.get(name) for name in names if isinstance(space.get(name), _EXPORTED)}
        self._exported += [(space, name, value) for name, value in exported.items()]
        return exported

    def hold(self):
        """Return whether every exported name still refers to the same object."""
        return all(space.get(name) is value for space, name, value in self._exported)

    def number(self, value):
        """Return the number of an object; assign a new one if it has none."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def form(self, value):
        """Return the JSON form of an object whose type is not builtin."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", *self.exception(value)]
        return ["object", self.number(value)]

    def exception(self, cls):
        """Return (name of the builtin base, derived classes) of an exception class.

        Each derived class is [number, name]; base classes come first.
        """
        derived = []
        for base in cls.__mro__:
            if base.__module__ == "builtins":
                return base.__name__, derived[::-1]
            if issubclass(base, BaseException):
                derived.append([self.number(base), base.__name__])
        raise AssertionError("every class derives from object")

    def value(self, form):
        """Return the object that a JSON form represents."""
        tag, number = form
        return (
            self._objects[number] if tag == "object" else getattr(importlib.import_module("builtins"), number)
        )


def answer(request, objects):
    """Execute a request; return ["value", value, args, hold] or ["raise", class, derived, args, hold].

    args: in a "value" answer, the arguments after the call, or None if the call did not change them; in a
    "raise" answer, the arguments of the exception. hold: see `Objects.hold`.
    """
    try:
        what, target, args, kwargs = request
        args = decode(args, objects.value)
        kwargs = decode(kwargs, objects.value)
        before = encode([args, kwargs], objects.form)
        if what == "import":
            module = importlib.import_module(target)
            names = list(getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"]))
            value = [module, names, objects.export(module, names)]
        elif what == "call":
            value = decode(target, objects.value)(*args, **kwargs)
        else:
            value = _OPERATIONS[what](decode(target, objects.value), *args)
        form = encode(value, objects.form)
        after = encode([args, kwargs], objects.form)
        return ["value", form, after if after != before else None, objects.hold()]
    except BaseException as error:  # includes SystemExit, which is also an answer
        name, derived = objects.exception(type(error))
        try:
            args = encode(error.args, objects.form)
        except (Malformed, RecursionError):
            args = ["tuple", []]
        return ["raise", name, derived, args, objects.hold()]


def main():
    """Answer requests until the other side closes the socket."""
    descriptor = int(sys.argv[1])
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    late.install()
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  (pathlib takes long to import)
    channel, objects = Channel(descriptor, dumps, marshal.loads), Objects()
    while True:
        try:
            request = channel.receive()
        except (EOFError, OSError):
            os._exit(0)
        try:
            channel.send(answer(request, objects))
        except Malformed as error:
            channel.send(["raise", "ValueError", [], ["tuple", [str(error)]], objects.hold()])
