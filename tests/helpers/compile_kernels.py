"""Compile every Triton kernel of the project for GPUs that are not here, as its launcher calls it.

    python -m tests.helpers.compile_kernels 80 90 100

The launchers run with CPU tensors and a driver that only names its GPU, so each kernel is specialised on the
arguments it really gets: strides of 1, sizes divisible by 16, dtypes. Down to machine code (ptxas); nothing
is launched. Prints one JSON object: kernel -> architecture -> vocabulary -> PTX of each distinct compilation.
Fails when a kernel of the modules was never launched here.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from rlpipe.drafts.kernels import tv
from rlpipe.spec import kernels
from rlpipe.spec.kernels import launch, programs
from rlpipe.weights import fingerprint_kernel
from tests.helpers.cli import ROOT
from tests.helpers.kernel_cases import RULES, random_case

sys.path.insert(0, str(ROOT / "sglang_env" / "plugin"))
from rlpipe_sglang import kernels as server

MODULES = (programs, tv, fingerprint_kernel, server)
VOCABS = (151_936, 151_665)  # rows that start at multiples of 16 elements, and rows that do not


class Driver:
    """The part of Triton's driver that compiling asks."""

    def __init__(self, capability: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: capability  # compilations are remembered by device
        self.get_current_stream = lambda device: 0


def entry_points(module: ModuleType) -> set[str]:
    """Names of the module's kernels that no other kernel of it calls."""
    functions = {name: x for name, x in vars(module).items() if isinstance(x, JITFunction)}
    return {
        name
        for name in functions
        if not any(f"{name}(" in other.src for key, other in functions.items() if key != name)
    }


def compile_all(capabilities: list[int]) -> dict[str, dict[int, dict[int, list[str]]]]:
    """PTX of every kernel by architecture; raises what Triton or ptxas raises."""
    compiled: dict[str, dict[int, dict[int, list[str]]]] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *arguments: object, **options: object) -> None:
        # Triton 3.6 and 3.8 lose a specialised number inside a tuple; 3.7 does not, and compiles
        assert not any(isinstance(x, tuple) for x in arguments), f"{self.fn.__name__} is passed a tuple"
        kernel = run(self, *arguments, **{**options, "warmup": True})
        assert kernel.asm["cubin"]
        name, capability = self.fn.__name__, triton.runtime.driver.active.get_current_device()
        ptx = compiled.setdefault(name, {}).setdefault(capability, {}).setdefault(vocab, [])
        if kernel.asm["ptx"] not in ptx:
            ptx.append(kernel.asm["ptx"])

    JITFunction.run = compile_only
    launch._programs = lambda device: (programs, False)
    for capability in capabilities:
        triton.runtime.driver.set_active(Driver(capability))
        for vocab in VOCABS:
            launch_verification(vocab)
            launch_total_variation(vocab)
            launch_fingerprint(vocab)
            launch_server(vocab)
    missing = set().union(*map(entry_points, MODULES)) - set(compiled)
    assert not missing, f"no launcher here runs {sorted(missing)}"
    return compiled


def launch_verification(vocab: int) -> None:
    """Each rule with one and with three drafts; one row of a batch as an engine passes it, and half types."""
    for batch, gamma, dtype in ((1, 1, torch.float32), (2, 3, torch.float32), (2, 3, torch.bfloat16)):
        case = random_case(batch, gamma, vocab)
        probs = {name: getattr(case, name).to(dtype) for name in ("draft_probs", "target_probs")}
        for rule in RULES:
            getattr(kernels, rule)(*case.with_(**probs).arguments(rule))


def launch_total_variation(vocab: int) -> None:
    """Statistics and gradient of bf16 logits, with and without the target's terms."""
    logits = torch.zeros(1, 2, vocab, dtype=torch.bfloat16)
    mask, tokens = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.long)
    lse, sums, factors = torch.zeros(1, 2), torch.zeros(8, 1, 2), torch.zeros(4, 1, 2)
    tv.normalizers(logits, 0.7)
    tv.overlaps(logits, logits, (lse, lse), (lse, lse), 0.7, keep_bits=False)
    _, bits = tv.overlaps(logits, logits, (lse, lse), (lse, lse), 0.7, keep_bits=True)
    call = logits, lse, sums, factors, mask, 0.7
    tv.gradient(*call, tokens=tokens, bits=bits)
    tv.gradient(*call, tokens=None, bits=bits)
    tv.gradient(*call, tokens=None, bits=None, target=logits, target_lse=lse)


def launch_fingerprint(words: int) -> None:
    """A whole tensor and the last part of a fused one; a tensor of one word, which is read alone."""
    sums = torch.zeros(2, dtype=torch.int64)
    for count, first in ((words, 0), (words, 8192), *([(1, 0)] if words % 16 else [])):
        data = torch.zeros(count, dtype=torch.int32)
        fingerprint_kernel.add_mixed(data, first, first + count, sums)


def launch_server(vocab: int) -> None:
    """Draw and verify as SGLang's plugin does: one, three and no drafts, both precisions."""
    for batch, depths, dtype in ((1, 1, torch.float32), (2, 3, torch.bfloat16), (2, 0, torch.float32)):
        logits, temperatures = torch.zeros(batch, depths + 1, vocab, dtype=dtype), torch.ones(batch, 1)
        drafts = torch.zeros(batch, depths, dtype=torch.int64)
        coins, uniforms = drafts.double(), torch.zeros(batch, dtype=torch.float64)
        kept = torch.zeros(batch + 1, max(1, depths), vocab)[:batch, :depths]
        server.verify(drafts, kept, logits, temperatures, coins, uniforms)
        server.draw(logits[:, 0], temperatures, drafts.new_ones(batch, dtype=torch.int32))
        server.draw(logits[:, 0].float(), None)


if __name__ == "__main__":
    print(json.dumps(compile_all([int(text) for text in sys.argv[1:]])))
