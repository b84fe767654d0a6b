"""Represents the code under test in the process that runs the tests, which never imports that code.

    import core; core.add(1, 2)   ->   {import core}, {getattr add}, {call (1, 2)}   ->   3

Owns imports from the code server and the proxies of its objects. Values of builtin types are copied; an
object of another type becomes a `Remote`. A module's functions and classes are requested once, and again only
if the code server reports that their names changed. An object of the code must not decide whether it equals
what a test expects. Therefore a Remote never equals a local value, and operators between the two raise; the
code server compares two Remotes. If a call changes arguments in place, they are changed here too. Callbacks,
subclassing and identity of values are not supported.
"""

import builtins
import importlib.machinery
import marshal
import sys
import types

from rlpipe.envs.swe.grader.codec import Channel, Malformed, decode, encode, loads


class Remote:
    """Proxy of an object of the code under test."""

    def __init__(self, code, number):
        object.__setattr__(self, "_remote", (code, number))

    def __getattr__(self, name):
        return _request(self, "getattr", name)

    def __setattr__(self, name, value):
        _request(self, "setattr", name, value)

    def __delattr__(self, name):
        _request(self, "delattr", name)

    def __call__(self, *args, **kwargs):
        code, number = self._remote
        return code.request("call", ["object", number], args, kwargs)

    def __eq__(self, other):
        return self is other or (isinstance(other, Remote) and _request(self, "eq", other) is True)

    def __hash__(self):
        return hash(_request(self, "hash"))

    def __bool__(self):
        return _request(self, "bool") is True

    def __instancecheck__(self, value):
        return isinstance(value, Remote) and _request(self, "isinstance", value) is True

    def __mro_entries__(self, bases):
        raise TypeError("a class of the code under test cannot be derived from by isolated tests")

    def __exit__(self, *error):
        return _request(self, "exit") is True

    def __repr__(self):
        return f"<{_request(self, 'repr')!s:.200}>"


def _request(remote, what, *args):
    code, number = object.__getattribute__(remote, "_remote")
    return code.request(what, ["object", number], args, {})


def _add_operators():
    """Add to Remote the unary operators, the index operators and the operators between two Remotes."""

    def one(what):
        return lambda self, *args: _request(self, what, *args)

    def two(what):
        return lambda self, other: (
            _request(self, what, other) if isinstance(other, Remote) else NotImplemented
        )

    for what in ("str", "len", "iter", "next", "neg", "getitem", "setitem", "delitem", "enter"):
        setattr(Remote, f"__{what}__", one(what))
    for what in ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv"):
        setattr(Remote, f"__{what}__", two(what))


_add_operators()


class Code:
    """Client of the code server in the process of the tests."""

    def __init__(self, descriptor):
        self._channel = Channel(descriptor, marshal.dumps, loads)
        self._remotes, self._exceptions, self.names_hold = {}, {}, True

    def request(self, what, target, args, kwargs):
        """Send a request to the code server, and return the resulting value.

        Raises the exception that the code raised, or RuntimeError if the answer is malformed.
        """
        args = list(args)
        request = [what, target, encode(args, self._form), encode(kwargs, self._form)]
        try:
            self._channel.send(request)
            raised, value = self._answer(self._channel.receive(), args, kwargs)
        except (Malformed, EOFError, OSError, RecursionError) as error:
            raise RuntimeError(f"the code under test gave no answer: {error}") from error
        if raised is not None:
            raise raised(*value)
        return value

    def _answer(self, message, args, kwargs):
        """Decode an answer: return (None, value) or (exception class, its arguments)."""
        if type(message) is list and message and message[-1] is not True:
            self.names_hold = False
        if type(message) is list and len(message) == 4 and message[0] == "value":
            _, form, changed, _ = message
            if changed is not None:
                renew([args, kwargs], decode(changed, self._value))
            return None, decode(form, self._value)
        if type(message) is list and len(message) == 5 and message[0] == "raise":
            _, name, derived, form, _ = message
            given = decode(form, self._value)
            if type(given) is not tuple:
                raise Malformed("arguments of an exception must be a tuple")
            return self._exception(name, derived), given
        raise Malformed(f"no answer: {message!r:.80}")

    def _form(self, value):
        if isinstance(value, Remote):
            return ["object", object.__getattribute__(value, "_remote")[1]]
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return ["builtin", value.__name__]
        raise TypeError(f"isolated tests cannot give the code under test a {type(value).__name__}")

    def _value(self, form):
        if form[0] == "object" and len(form) == 2 and type(form[1]) is int:
            return self._remotes.setdefault(form[1], Remote(self, form[1]))
        if form[0] == "exception" and len(form) == 3:
            return self._exception(*form[1:])
        raise Malformed(f"no value: {form!r:.80}")

    def _exception(self, name, derived):
        """Return a local exception class for a remote one: a builtin class or a class derived from it."""
        cls = getattr(builtins, name, None) if type(name) is str else None
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            raise Malformed(f"no builtin exception: {name!r:.80}")
        if type(derived) is not list or len(derived) > 20:
            raise Malformed("no list of derived exceptions")
        for entry in derived:
            if type(entry) is not list or list(map(type, entry)) != [int, str] or "\0" in entry[1]:
                raise Malformed(f"no derived exception: {entry!r:.80}")
            number, name = entry
            if number not in self._exceptions:
                self._exceptions[number] = type(name, (cls,), {})
            cls = self._exceptions[number]
        return cls


def renew(old, new):
    """Update a container to its new content in place, and also the containers in it, matched by position.

    >>> inner = [1]; outer = [inner]; _ = renew(outer, [[1, 2]]); inner
    [1, 2]
    """
    if type(old) is not type(new):
        return new
    if type(old) is list:
        kept = [renew(*pair) for pair in zip(old, new, strict=False)]
        old[:] = kept + new[len(kept) :]
    elif type(old) is dict:
        kept = {key: renew(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(kept)
    elif type(old) is set:
        old.intersection_update(new)
        old.update(new)
    elif type(old) is bytearray:
        old[:] = new
    else:
        return new
    return old


class ProxyModule(types.ModuleType):
    """Proxy of a module of the code under test."""

    def __getattr__(self, name):
        if "__remote__" not in self.__dict__:
            raise AttributeError(name)  # the module is still being imported
        remote, exported = self.__dict__["__remote__"], self.__dict__["__exported__"]
        return exported[name] if name in exported and remote._remote[0].names_hold else getattr(remote, name)

    def __setattr__(self, name, value):
        if name.startswith("__") or isinstance(value, types.ModuleType):
            super().__setattr__(name, value)  # attributes that the import system sets
        else:
            setattr(self.__dict__["__remote__"], name, value)

    def __delattr__(self, name):
        delattr(self.__dict__["__remote__"], name)


class Finder:
    """Imports the named modules from the code server. modules: dotted name -> its folder, or None."""

    def __init__(self, code, modules):
        self._code, self._modules = code, modules

    def find_spec(self, name, path=None, target=None):
        """Return a spec for a module of the code under test; None for all other modules."""
        if name not in self._modules:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=self._modules[name] is not None)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(self._modules[name])
        return spec

    def create_module(self, spec):
        """Return an empty proxy of a module."""
        return ProxyModule(spec.name)

    def exec_module(self, module):
        """Import the module in the code server."""
        answer = self._code.request("import", module.__name__, (), {})
        if type(answer) is not list or list(map(type, answer)) != [Remote, list, dict]:
            raise ImportError(f"the code under test gave no module {module.__name__}")
        remote, names, exported = answer
        module.__dict__.update(__remote__=remote, __all__=names, __exported__=exported)


def install(descriptor, modules):
    """Make further imports of the named modules use the code server.

    descriptor: descriptor of the socket to the server. modules: dotted name -> its folder, or None.
    """
    sys.meta_path.insert(0, Finder(Code(descriptor), modules))
