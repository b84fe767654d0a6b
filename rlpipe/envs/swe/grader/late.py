"""Imports rarely needed modules only on use, because starting Python is most of the cost of grading.

Owns two kinds of modules: packages outside the standard library, whose folders are added to the path when an
import fails (`python3 -S` omits them), and modules of the standard library that unittest needs only for
failures. Runs inside the sandboxes.
"""

import builtins
import importlib
import importlib.machinery
import sys
import types


class LatePackages:
    """The last finder of imports: at its first use, it removes itself and adds the installed packages."""

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a module that no other finder has, or None."""
        sys.meta_path.remove(self)
        importlib.import_module("site").main()
        return importlib.machinery.PathFinder.find_spec(name, path)


class LateModule(types.ModuleType):
    """Placeholder of a standard library module, which is imported when one of its attributes is used."""

    def __getattr__(self, name):
        if sys.modules.get(self.__name__) is not self:
            raise AttributeError(name)
        del sys.modules[self.__name__]
        vars(self).update(vars(importlib.import_module(self.__name__)))
        return getattr(self, name)


def install(*modules):
    """Postpone the import of `site` and of the named modules."""
    builtins.exit = builtins.quit = sys.exit
    sys.meta_path.append(LatePackages())
    sys.modules.update((name, LateModule(name)) for name in modules)
