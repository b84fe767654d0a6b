"""What the plugin adds on a CPU for DeepSeek-V3 and the drafts of mixtures, with SGLang's names played."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
METHODS = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods"
PLAIN = 4, 4, 512, 10000, False  # sizes of a rotary embedding, and whether it rotates halves


@pytest.fixture
def plugin(monkeypatch):
    """The plugin's modules, with the few names of SGLang that they import."""
    monkeypatch.syspath_prepend(str(ROOT / "sglang_env" / "plugin"))
    content = {METHODS: {"AttnForwardMethod": SimpleNamespace(MLA="latent")}}
    content["sglang.srt.layers.rotary_embedding.factory"] = {"get_rope": lambda *given: given}
    content["sglang.srt.plugins.hook_registry"] = {"HookType": str}
    for name, names in content.items():
        for end in [place for place, letter in enumerate(name) if letter == "."]:
            monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
        made = ModuleType(name)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)
    from rlpipe_sglang import cpu, plugin

    yield SimpleNamespace(cpu=cpu, plugin=plugin)
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        del sys.modules[name]


def test_attention_without_kernels_reads_latent_vectors_and_other_attention_is_sglangs(plugin):
    def theirs(registry, backend):
        return registry, backend

    assert plugin.cpu.handler(theirs, "registry", "torch_native")("layer", "batch") == "latent"
    assert plugin.cpu.handler(theirs, "registry", "triton") == ("registry", "triton")


def test_plain_rotary_embeddings_are_made_and_scaled_ones_are_sglangs(plugin):
    def theirs(*given):
        return "theirs", *given

    scaled = {"rope_type": "deepseek_yarn", "factor": 4.0}
    assert plugin.cpu.rotary(theirs, *PLAIN, None, torch.float32, 1.0, "cpu") == (
        *PLAIN, None, torch.float32, 1.0,
    )  # fmt: skip
    assert plugin.cpu.rotary(theirs, *PLAIN, scaled, None, 1.0, "cpu")[:7] == ("theirs", *PLAIN, scaled)


def test_a_draft_has_the_embedding_and_head_of_its_target(plugin):
    draft = torch.nn.Module()
    draft.model = torch.nn.Module()
    draft.model.embed_tokens, draft.lm_head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
    embed, head = (torch.nn.Parameter(torch.randn(8, 4)) for _ in "eh")
    plugin.cpu.shared(None, draft, embed, head)
    assert draft.model.embed_tokens.weight is embed and draft.lm_head.weight is head


@pytest.mark.parametrize("on_cpu", [False, True])
def test_these_are_hooked_in_a_scheduler_on_a_cpu_alone(plugin, monkeypatch, on_cpu):
    entry, hooked = plugin.plugin, []
    registry = SimpleNamespace(register=lambda target, *_: hooked.append(target.rpartition(".")[2]))
    monkeypatch.setattr(
        sys.modules["sglang.srt.plugins.hook_registry"], "HookRegistry", registry, raising=False
    )
    monkeypatch.setattr(entry.multiprocessing, "parent_process", lambda: "launcher")
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", ModuleType("scheduler"))
    monkeypatch.setattr(entry, "HOOKS", ())
    monkeypatch.setattr(entry, "digest", lambda hook: hook.source)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    if on_cpu:
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    entry.load()
    expected = ["get_handler", "get_rope_cpu", "set_embed_and_head", "set_embed_and_head"]
    assert hooked == (expected if on_cpu else [])
