"""scripts/gpu_check on rows that need no GPU, and the arithmetic of its own rows: planted speeds come out."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import json
import shlex
import sys
import time
from argparse import Namespace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlpipe.models import read_architecture
from rlpipe.preflight.memory_check import excess
from rlpipe.preflight.memory_estimate import GIB, RESERVED, server_memory
from rlpipe.types import FinishReason, GenerateResult, SpecCounts
from tests.helpers.cli import ROOT
from tests.helpers.virtual_time import VirtualLoop

sys.path.insert(0, str(ROOT / "scripts" / "lib"))
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import checkpoint_peaks
import decoding_modes
import experts
import fingerprint
import gpu_plan
import loop_modes
import token_versions
import tv_loss
import verify_kernel
import weight_path
from harness import Samples

from tests.unit.preflight.test_memory_estimate import composed

pytestmark = pytest.mark.unit

CARD = 80 * GIB
PLAN = {row.name: row for row in gpu_plan.plan()}


@pytest.fixture(scope="module")
def script():
    """scripts/gpu_check as a module."""
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


# ---- the command, on rows that are planted ----


def planted_row(name: str, code: str, **options) -> gpu_plan.Row:
    """A row whose process runs this Python, with `write` for its report."""
    code = f"import json, sys, time; write = lambda r: open(sys.argv[1], 'w').write(json.dumps(r)); {code}"
    figure = gpu_plan.Figure(name="speed", read=gpu_plan.at("speed"), unit="GB/s", at_least=2)
    command = f"{{python}} -c {shlex.quote(code)} {{out}}"
    return gpu_plan.Row(name=name, command=command, small=command, seconds=5, figures=(figure,), **options)


ROWS = [
    planted_row("fast", "write({'speed': 3})"),
    planted_row("slow", "write({'speed': 1})"),
    planted_row("breaks", "write({'speed': 4}); sys.exit('out of memory')"),
    planted_row("says nothing", "pass"),
    planted_row("writes half", "open(sys.argv[1], 'w').write('{')"),
    planted_row("last", "write({'speed': 2})"),
]


@pytest.fixture
def check(script, monkeypatch, tmp_path):
    """Run the command on rows as on a machine with a GPU: exit status and outcomes by name."""
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script, "machine", lambda small: "a GPU")
    out = tmp_path / "out.json"

    def run(rows, *options):
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--json", str(out), *options])
        status = script.main(rows)
        return status, {row["name"]: row for row in json.loads(out.read_text())["rows"]}

    return run


def test_a_row_that_fails_is_reported_once_with_what_it_measured_and_the_others_run(check):
    status, found = check(ROWS)
    assert status == 1
    outcomes = {name: (row["outcome"], [f["held"] for f in row["figures"]]) for name, row in found.items()}
    assert outcomes == {
        "fast": ("done", [True]),
        "slow": ("done", [False]),
        "breaks": ("failed", [True]),
        "says nothing": ("done", [None]),
        "writes half": ("failed", []),
        "last": ("done", [True]),
    }
    assert found["breaks"]["why"].endswith("out of memory") and found["breaks"]["figures"][0]["value"] == 4
    assert "KeyError('speed')" in found["says nothing"]["figures"][0]["why"]


def test_a_missed_goal_alone_makes_the_exit_status_1(check):
    assert check(ROWS[:1])[0] == 0
    assert check(ROWS[:2])[0] == 1


def test_results_are_written_after_each_row(check, script, monkeypatch):
    written = []
    monkeypatch.setattr(script, "write", lambda out, report: written.append(len(report["rows"])))
    with pytest.raises(FileNotFoundError):  # the file that this test keeps from being written
        check(ROWS[:3])
    assert written == [1, 2, 3]


def test_continue_runs_the_rows_that_have_no_outcome_yet(check, script, monkeypatch):
    check(ROWS[:2])
    ran, real = [], script.run
    monkeypatch.setattr(script, "run", lambda row, **how: ran.append(row.name) or real(row, **how))
    _, found = check(ROWS[:3], "--continue")
    assert ran == ["breaks"] and list(found) == ["fast", "slow", "breaks"]

    # What another commit measured does not count.
    monkeypatch.setattr(script, "commit", lambda: "another")
    check(ROWS[:1], "--continue")
    assert ran == ["breaks", "fast"]


def test_rows_beyond_the_minutes_are_named_and_continued_later(check):
    _, found = check(ROWS[:1], "--minutes", "0")
    assert found["fast"]["outcome"] == "skipped" and "0 minutes are spent" in found["fast"]["why"]
    _, found = check(ROWS[:1], "--continue")
    assert found["fast"]["outcome"] == "done"


def test_a_row_that_takes_too_long_ends_with_all_that_it_started(script, tmp_path):
    file = tmp_path / "late"
    child = f"import time; time.sleep(1); open({str(file)!r}, 'w')"
    row = planted_row(
        "hangs", f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    found = script.run(row, folder=tmp_path, small=False, seconds=0.4)
    assert found["outcome"] == "stopped" and found["seconds"] < 30

    # Its child would have written by now.
    time.sleep(1.2)
    assert not file.exists()


def test_only_takes_rows_whose_names_contain_a_text(check):
    assert set(check(ROWS, "--only", "fas", "las")[1]) == {"fast", "last"}


# ---- the plan ----


def test_the_first_rows_fit_nine_minutes_and_have_all_that_was_asked_for_first():
    first = [row for row in gpu_plan.plan() if not row.later]
    assert sum(row.seconds for row in first) <= 9 * 60
    order = ["kernels", "update of 1.5B", "loop of 1.5B", "decoding of 7.8B", "save and resume"]
    order += ["versions", "MoE"]
    starts = [next(n for n, row in enumerate(first) if row.name.startswith(text)) for text in order]
    assert starts == sorted(starts)
    assert [row.later for row in gpu_plan.plan()] == sorted(row.later for row in gpu_plan.plan())


def test_heads_of_grown_models_fill_the_hidden_size_as_a_server_needs():
    assert all(hidden == heads * dim for hidden, heads, _, dim, *_ in gpu_plan.SHAPES.values())


def test_every_gpu_test_is_in_a_row():
    commands = " ".join(row.command for row in PLAN.values())
    for file in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert f"tests/gpu/{file.name}" in commands


def grown_config(size: str) -> dict:
    """config.json of a grown model, as far as an estimate reads it."""
    hidden, heads, kv_heads, dim, inner, layers, vocab = gpu_plan.SHAPES[size]
    return {
        **{"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
        **{"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads},
        **{"head_dim": dim, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab},
        **{"max_position_embeddings": 65536, "tie_word_embeddings": False},
    }


def decoding_options(row: gpu_plan.Row) -> Namespace:
    """The options that a row gives decoding_modes.py, as far as they decide what fits."""
    words = row.command.split()
    at = words.index("--batches") + 1
    batches = [int(word) for word in words[at:] if word.isdigit()][:2]
    long = int(words[words.index("--long") + 1]) if "--long" in words else 0
    batches = [batch for batch in batches if batch not in (1, long) or batch == 1]
    return Namespace(
        model="",
        engine="sglang",
        device="cuda",
        gamma=3,
        batches=batches,
        tokens=200,
        long=long,
        all_graphs=False,
    )


@pytest.mark.parametrize("name", [n for n in PLAN if n.startswith("decoding of")])
def test_servers_of_rows_fit_80_gib_by_the_estimate(name, tmp_path):
    """The share for weights and KV leaves what the estimate counts beside them, and holds the batches."""
    size = "7.8B" if "7.8B" in name else "1.5B"
    (tmp_path / "config.json").write_text(json.dumps(grown_config(size)))
    given = decoding_options(PLAN[name])
    given.model = tmp_path
    config = decoding_modes.settings("rejection", given)
    config.rollout.sglang.memory_fraction = share = decoding_modes.fitting_share(config, CARD)

    arch = read_architecture(grown_config(size))
    memory = server_memory(arch, config, CARD)
    assert 0.5 < share < 0.97 and memory.total + RESERVED <= CARD
    per_token = 2 * (arch.layers + 1) * arch.kv_heads * arch.head_dim * 2
    wanted = max(max(given.batches) * 500, decoding_modes.LONG_BATCH * given.long)
    assert memory.parts["kv"] > wanted * per_token


def test_loops_of_rows_fit_80_gib_by_the_estimate(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(grown_config("1.5B")))
    row = PLAN["loop of 1.5B on two shared GPUs"].command.split()
    shared = [word for word in row if "=" in word]
    for settings in (loop_modes.ON_ONE_GPU, shared):
        given = [f"model.path={tmp_path}", *settings, *loop_modes.WORK]
        config = OmegaConf.to_object(composed(*given))
        assert not excess(config, CARD, 0)


# ---- planted speeds: the arithmetic of each row, by the code of its bench ----


class Server:
    """An engine that takes `step_s` of virtual time for a step of any batch, of `per_step` tokens each."""

    def __init__(self, step_s: float, per_step: int, drafts: bool) -> None:
        self.step_s, self.per_step, self.drafts = step_s, per_step, drafts
        self.running = self.most = 0

    async def generate(self, request) -> GenerateResult:
        tokens = request.sampling.max_new_tokens
        steps = tokens // self.per_step
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(steps * self.step_s)
        self.running -= 1
        return generated(request.request_id, [0] * tokens, steps=steps * self.drafts)


def generated(name: str, tokens, versions=None, steps: int = 0) -> GenerateResult:
    count = len(tokens)
    return GenerateResult(
        request_id=name,
        output_ids=tokens,
        logprobs=[-1.0] * count,
        entropies=[1.0] * count,
        versions=[0] * count if versions is None else versions,
        finish_reason=FinishReason.LENGTH,
        spec=SpecCounts(verify_steps=steps),
    )


def decode(step_s: float, per_step: int, batch: int, drafts: bool) -> dict[str, float]:
    loop, server = VirtualLoop(), Server(step_s, per_step, drafts)
    try:
        speed = loop.run_until_complete(
            decoding_modes.batch_speed(
                server, "t", decoding_modes.prompts(), batch=batch, tokens=120, clock=loop.time
            )
        )
    finally:
        loop.close()
    assert server.most == batch
    return speed


def decoding_report(*modes: str) -> dict:
    """Servers with steps of 20 ms and 3 tokens with drafts, 10 ms without, at any batch."""
    results = {}
    for mode in modes:
        drafts = mode != "none"
        by_batch = {
            str(batch): decode(0.02 if drafts else 0.01, 3 if drafts else 1, batch, drafts)
            for batch in (1, 64, 256)
        }
        results[mode] = {
            "start_s": 50.0,
            "s_per_graph": decoding_modes.seconds_per_graph(
                "Capture decode CUDA graph end. bs=[1, 64], elapsed=0.50 s, mem usage=1 GB\n"
                "Capture draft CUDA graph end. bs=[1, 64], elapsed=0.30 s, mem usage=1 GB"
            ),
            "batches": by_batch,
            "long": by_batch["1"],
        }
    return {"modes": results, "ratios": decoding_modes.ratios(results)}


def loop_report(*modes: str) -> dict:
    """Runs whose first step is slow; 2 s a step with drafts, 3 s without."""
    results = {}
    for mode in modes:
        step = 2.0 if mode == "rejection" else 3.0
        records = [
            {
                "timing_s/step": seconds,
                "timing_s/update_weights": 0.25,
                "weights/canary_failures": 0.0,
                "training/rollout_probs_diff_mean": 0.004,
                "spec/verified_without_kernels": 0.0,
                "perf/tokens_per_s/rollout": 9000.0,
            }
            for seconds in (50.0, step, step, step + 9)
        ]
        results[mode] = loop_modes.summary(records)
    return {"modes": results, "step_ratios": loop_modes.step_ratios(results)}


def loss_report(_) -> dict:
    args = Namespace(rows=8192, vocab=151936, dtype="bfloat16")
    runs = [(0.003, 900_000_000, 0.5), (0.004, 950_000_000, 0.5), (0.0035, 900_000_000, 0.5)]
    slow = [(10 * seconds, peak, loss) for seconds, peak, loss in runs]
    arms = {arm: tv_loss.summary(arm, taken, 3e12, args) for arm, taken in (("ours", runs), ("fused", slow))}
    return {"results": {"arms": arms}}


def verification_report(_) -> dict:
    import torch

    now = [0.0]

    def arm(seconds):
        def run():
            now[0] += seconds
            return torch.zeros(8)

        return run

    arms = {"torch": arm(4e-4), "triton": arm(2.5e-5)}
    rows = verify_kernel.measure(arms, "cpu", 3, 0.05, clock=lambda: now[0])
    return {"results": {"chain, vocab 151936, batch 8, gamma 3": {"arms": rows}}}


def update_report(monkeypatch) -> dict:
    """An update: paused at 1 s, loaded for 0.5 s, hashed for 0.25 s by the server, continued at 1.875 s."""
    now = [1.0]
    monkeypatch.setattr(weight_path.time, "perf_counter", lambda: now[0])
    for owner, name in (
        (weight_path.shared_memory.SharedBuckets, "write"),
        (weight_path.IpcRoot, "send"),
        (weight_path.BucketChecksums, "add"),
        (weight_path.Root, "send"),
        (weight_path.sync.WeightSync, "_checksums"),
    ):
        monkeypatch.setattr(owner, name, lambda *_: now.__setitem__(0, now[0] + 0.125))

    async def takes(path, *_):
        now[0] += {"/update_weights_from_ipc": 0.5, "/weights_checker": 0.25}.get(path, 0.0)

    profile, client = weight_path.Profile(), SimpleNamespace(post=takes, read=takes)
    profile.install(SimpleNamespace(_http=client))

    async def update():
        await client.post("/pause_generation")
        weight_path.IpcRoot.send(None)
        await client.post("/update_weights_from_ipc")
        await client.read("/weights_checker")
        await client.post("/continue_generation")
        weight_path.BucketChecksums.add(None, [])

    asyncio.run(update())
    measured = {"median_s": now[0] - 1, "parts_s": dict(profile.seconds)}
    return {"results": {"ipc": measured, "shared": measured}}


def checkpoint_report(_) -> dict:
    one = {"save": 3e9, "card": 2e8, "stall_s": 1.5, "seconds": 12.0, "norm": 2.0}
    other = one | {"save": 4e9, "stall_s": 2.5}
    resumed = [{"resume": 1e9, "seconds": 5.0, "norm": 2.002}] * 2
    return {"rows": [checkpoint_peaks.summary([one, other], resumed, int(4.4e9))]}


def versions_report(_) -> dict:
    high = token_versions.KNOWN + 5
    results = [
        generated("right", [1, 2, high, high], [0, 0, 1, 1]),
        generated("late", [1, 2, high, 3, 4], [0, 1, 1, 1, 2]),  # two tokens bear the next version too early
        generated("one version", [7], [2]),
    ]
    return token_versions.count(results)


def experts_report(_) -> dict:
    samples = Samples({"grouped": [0.1, 0.1, 0.1], "loop": [0.4, 0.3, 0.2]})
    return experts.summary(samples, 16384, unit="s")


SPEED_3 = 3 / 0.02  # tokens a second of one request with drafts
DECODED = {
    **{f"rejection, batch {batch}": batch * SPEED_3 for batch in (1, 64)},
    **{f"none, batch {batch}": batch * 100.0 for batch in (1, 64)},
    **{f"rejection / none, batch {batch}": 1.5 for batch in (1, 64)},
    "rejection, 32768 tokens of context": SPEED_3,
    "none, 32768 tokens of context": 100.0,
    "capture of a graph": 0.2,
}
UPDATED = {
    "whole": 1.0,
    "server paused": 0.875,
    "hand over": 0.125,
    "load": 0.5,
    "our hash": 0.125,
    "server hash": 0.25,
}
MEMORY = (
    lambda _: {"rows": [{"measured": 40e9, "ratio": 0.8}]},
    {"peak": 40.0, "peak over its estimate": 1.25},
)
SCORE = (
    lambda _: {"largest_score": 2.5, "judged": {"rlpipe": 3, "rlpipe without kernels": 1}},
    {"largest score": 2.5, "verified by rlpipe's kernels": 0.75},
)
PLANTED = {  # by the start of a row's name: its report, and the figures that must come out
    "kernels: TV loss": (
        loss_report,
        {"from logits": 3.5, "from hidden states of 4096": 35.0, "its memory": 950.0},
    ),
    "kernels: verification": (verification_report, {"called from Python": 25.0}),
    "update of": (update_report, UPDATED),
    "loop of 1.5B, rejection and none": (
        lambda _: loop_report("rejection", "none"),
        {
            "step": 2.0,
            "step without drafts over it": 1.5,
            "weight update": 0.25,
            "generation": 9000.0,
            "log-probabilities against the trainer": 0.004,
            "verified without kernels": 0.0,
            "failures of the canary": 0.0,
        },
    ),
    "decoding of 7.8B, rejection and none": (lambda _: decoding_report("rejection", "none"), DECODED),
    "save and resume": (
        checkpoint_report,
        {
            "training blocked by a save": 2.5,
            "added on the GPU": 0.2,
            "added on the host": 4.0,
            "estimate of that": 1.1,
            "norm after resuming, off by": 0.001,
        },
    ),
    "versions of tokens": (versions_report, {"wrong": 2, "turns across an update": 2}),
    "MoE micro-batch": (experts_report, {"grouped": 0.1, "over a loop over experts": 3.0}),
    "loop of 1.5B on two": (
        lambda _: loop_report("rejection"),
        {"weight update": 0.25, "failures of the canary": 0.0},
    ),
    "decoding of 1.5B": (
        lambda _: decoding_report("rejection"),
        {"start": 50.0, "capture of a graph": 0.2, "rejection, batch 256": 256 * SPEED_3},
    ),
    "memory of training": MEMORY,
    "embedded engine": (
        lambda _: decoding_report("rejection"),
        {f"rejection, batch {batch}": batch * SPEED_3 for batch in (1, 64)},
    ),
    "fingerprint": (
        lambda _: {"results": fingerprint.summary(Samples({"mix": [2.0, 4.0, 4.0]}), int(3.2e9))},
        {"speed": 0.8},
    ),
    "decoding of 7.8B, rejection and rejection, stock": (
        lambda _: decoding_report("rejection", "rejection, stock", "block"),
        {
            "block, batch 1": SPEED_3,
            "block, batch 64": 64 * SPEED_3,
            "rejection / rejection, stock, batch 64": 1.0,
        },
    ),
    "distribution of": SCORE,
}


def planted_for(name: str):
    """The longest start that fits, as one row's name may begin like another's."""
    return PLANTED[max((start for start in PLANTED if name.startswith(start)), key=len)]


@pytest.mark.parametrize("name", [name for name, row in PLAN.items() if row.figures])
def test_planted_speeds_come_out_as_planted(name, monkeypatch, script, tmp_path):
    make, expected = planted_for(name)
    (tmp_path / "out.json").write_text(json.dumps(make(monkeypatch)))
    found = script.read_figures(PLAN[name], tmp_path / "out.json", small=False)
    assert {figure["name"]: figure["value"] for figure in found} == pytest.approx(expected, rel=0.02)
    for figure, planted in zip(PLAN[name].figures, found, strict=True):
        assert planted["held"] is figure.holds(planted["value"])


@pytest.mark.parametrize(
    ("bound", "value", "held"),
    [*product(["at_most"], [1.9, 2.1], [None]), *product(["at_least"], [1.9, 2.1], [None])],
)
def test_a_goal_is_a_bound_from_the_right_side(bound, value, held):
    figure = gpu_plan.Figure(name="speed", read=gpu_plan.at("speed"), **{bound: 2.0})
    assert figure.holds(value) is ((value < 2) == (bound == "at_most"))
    assert gpu_plan.Figure(name="speed", read=gpu_plan.at("speed")).holds(value) is None


def test_long_contexts_share_no_prefix_and_are_of_real_turns():
    first, second = decoding_modes.prompts(1000)
    assert len(first) == len(second) == 1000 and first[:64] != second[:64]
    assert max(max(context) for context in decoding_modes.prompts()) < token_versions.KNOWN


def test_swapped_weights_say_the_same_with_other_tokens():
    import torch

    tables = {name: torch.randn(2000, 4) for name in token_versions.TABLES}
    weights = tables | {"model.norm.weight": torch.ones(4)}
    other = token_versions.swapped(weights)
    known, added = slice(token_versions.KNOWN), slice(token_versions.KNOWN, 2 * token_versions.KNOWN)
    for name in tables:
        assert torch.equal(other[name][added], weights[name][known])
        assert torch.equal(other[name][known], weights[name][added])
    again = token_versions.swapped(other)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert np.isin(list(other), list(weights)).all()
