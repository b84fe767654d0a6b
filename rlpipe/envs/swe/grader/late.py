"""Imports rarely needed modules only on use, because starting Python is most of the cost of grading.

Owns two kinds: packages outside the standard library, whose folders `python3 -S` leaves out until an import
fails, and modules of the standard library that unittest uses only for failures. Runs inside the sandboxes.
"""

import builtins
import importlib
import importlib.machinery
import sys
import types


class LatePackages:
    """Finds installed packages: the last finder, replaced by `site` at its first use."""

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a module that no other finder knows, or None."""
        sys.meta_path.remove(self)
        importlib.import_module("site").main()
        return importlib.machinery.PathFinder.find_spec(name, path)


class LateModule(types.ModuleType):
    """Replaces a module of the standard library until an attribute of it is used."""

    def __getattr__(self, name):
        if sys.modules.get(self.__name__) is not self:
            raise AttributeError(name)
        del sys.modules[self.__name__]
        vars(self).update(vars(importlib.import_module(self.__name__)))
        return getattr(self, name)


def install(*modules):
    """Postpone `site` and the named modules."""
    builtins.exit = builtins.quit = sys.exit
    sys.meta_path.append(LatePackages())
    sys.modules.update((name, LateModule(name)) for name in modules)
