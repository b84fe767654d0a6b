"""Serves the code under test to tests that run elsewhere: the only process that imports the model's code.

Owns the objects of that code. Answers requests over a socket (see `proxy`) until it is closed; knows no test,
no test id and no result. This process is not trusted: its answers are decoded strictly. Requests come from a
trusted process and are read by marshal. Answers are JSON.
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
    """Objects by number; an object keeps its number and is kept as long as the process."""

    def __init__(self):
        self._objects, self._numbers, self._exported = [], {}, []

    def export(self, module, names):
        """Return the functions and classes among the names of a module: the tests ask for each only once."""
        space = vars(module)
        exported = {name: space.get(name) for name in names if isinstance(space.get(name), _EXPORTED)}
        self._exported += [(space, name, value) for name, value in exported.items()]
        return exported

    def hold(self):
        """Return whether every name that was exported means what it meant."""
        return all(space.get(name) is value for space, name, value in self._exported)

    def number(self, value):
        """Return the number of an object, a new one when it has none."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def form(self, value):
        """Return the JSON form of an object of no builtin type."""
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", *self.exception(value)]
        return ["object", self.number(value)]

    def exception(self, cls):
        """Return (builtin class name, [[number, name] of each class derived from it, the basic first])."""
        derived = []
        for base in cls.__mro__:
            if base.__module__ == "builtins":
                return base.__name__, derived[::-1]
            if issubclass(base, BaseException):
                derived.append([self.number(base), base.__name__])
        raise AssertionError("every class derives from object")

    def value(self, form):
        """Return the object that a form stands for."""
        tag, number = form
        return (
            self._objects[number] if tag == "object" else getattr(importlib.import_module("builtins"), number)
        )


def answer(request, objects):
    """Return what a request gives: ["value", value, args, hold] or ["raise", class, derived, args, hold].

    args: the arguments afterwards, None when the call left them as they were, or of the exception.
    hold: see `Objects.hold`.
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
    except BaseException as error:  # SystemExit and the like are answers as well
        name, derived = objects.exception(type(error))
        try:
            args = encode(error.args, objects.form)
        except (Malformed, RecursionError):
            args = ["tuple", []]
        return ["raise", name, derived, args, objects.hold()]


def main():
    """Answer until the other side closes."""
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
