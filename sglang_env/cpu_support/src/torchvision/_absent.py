"""The attributes of every module of this replacement of torchvision."""

from __future__ import annotations

from collections.abc import Callable


def absent(module: str) -> Callable[[str], type]:
    """Return a module's `__getattr__`, for which any name is a class that cannot be instantiated."""

    def __getattr__(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(self, *_, **__):
            raise NotImplementedError(
                f"{module}.{name}: torchvision is not installed in SGLang's CPU environment, "
                "which serves text models only"
            )

        return type(name, (), {"__init__": refuse})

    return __getattr__
