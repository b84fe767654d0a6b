"""Functions that the plugin hooks are, in the SGLang that is installed, those that it was written against."""

import ast
import hashlib
import sys

import pytest

from rlpipe.config.sglang import SglangConfig
from rlpipe.rollout.sglang.environment import find_environment
from tests.helpers.cli import ROOT
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.integration


@pytest.fixture
def hooks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "sglang_env" / "plugin"))
    from rlpipe_sglang.plugin import ADAPTIVE, CPU, FILES, HOOKS

    yield HOOKS + ADAPTIVE + CPU + FILES
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        del sys.modules[name]


def source_digest(text, name):
    """Hash of the function `name`, read without importing SGLang: the server's `plugin.digest`."""
    node = ast.parse(text)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines(keepends=True)[first - 1 : node.end_lineno]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def test_every_hooked_function_has_the_source_that_was_hooked(hooks):
    needs_sglang()
    environment = find_environment(SglangConfig(), on_gpu=False)
    (installed,) = environment.python.parents[1].glob("lib/python*/site-packages")
    for hook in hooks:
        text = installed.joinpath(*hook.module.split(".")).with_suffix(".py").read_text()
        assert source_digest(text, hook.name) == hook.source, (
            f"{hook.place} has changed: read it again, adapt the plugin, and enter its new digest"
        )
        last = hook.name.split(".")[-1]
        assert source_digest(text.replace(f"def {last}(", f"def {last}( "), hook.name) != hook.source
