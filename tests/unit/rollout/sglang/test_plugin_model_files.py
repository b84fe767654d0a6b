"""Which of SGLang's model files a server imports, with a folder of files for SGLang's."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
FILES = {
    "another": "raise RuntimeError('it is not the served model')",
    "base": "class Served: pass",  # a base of that name, which is no entry
    "mention": "# class Served is in another file\nraise RuntimeError",
    "served": "class Served: pass\nclass Sibling: pass\nEntryClass = [Served, Sibling]",
    "single": "class Single: pass\nEntryClass = Single",
}


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """SGLang's registry, empty, and the hook as `sglang.hook(config)`."""
    monkeypatch.syspath_prepend(str(ROOT / "sglang_env" / "plugin"))
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    models = ModuleType("sglang.srt.models")
    models.__path__ = [str(tmp_path)]
    there = ModuleType("sglang.srt.models.registry")
    there.ModelRegistry = SimpleNamespace(models={})
    packages = {name: ModuleType(name) for name in ("sglang", "sglang.srt")}
    for name, module in (packages | {models.__name__: models, there.__name__: there}).items():
        monkeypatch.setitem(sys.modules, name, module)
    from rlpipe_sglang.model_files import one_file

    there.ModelRegistry.resolve = lambda *names: one_file(
        lambda config: sorted(there.ModelRegistry.models),
        SimpleNamespace(hf_config=SimpleNamespace(architectures=names)),
    )
    yield there.ModelRegistry
    for name in [name for name in sys.modules if name.startswith(("rlpipe_sglang", "sglang.srt.models."))]:
        del sys.modules[name]


def test_only_the_file_that_has_the_class_is_imported(registry):
    assert registry.resolve("Served") == ["Served", "Sibling"]
    assert registry.resolve("Single") == ["Served", "Sibling", "Single"]


def test_a_class_that_no_file_has_is_left_to_sglang(registry):
    assert registry.resolve("Serv") == []


def test_a_class_that_is_there_is_not_replaced(registry):
    registry.models["Served"] = "of the user's package"
    assert registry.resolve("Served") == ["Served"]
    assert registry.models["Served"] == "of the user's package"
