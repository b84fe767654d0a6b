"""What CONTRIBUTING promises: a new one of each kind of thing is a file or two and rows."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from tests.helpers.cli import ROOT, SMALL, environment
from tests.helpers.processes import in_a_process
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.packaging
OBJECTIVE_ROWS = {
    "config/draft_objectives.py": [('    PPOW = "ppow"', '    SQUARED = "squared"')],
    "drafts/objectives/supervised.py": [
        ("def hard_ce(", "def squared(rows):\n    return (1 - rows.alpha) ** 2\n\n"),
        ("    DraftObjective.HARD_CE:", "    DraftObjective.SQUARED: Supervised(by_depth=squared),"),
    ],
}
CHECK = """
import torch
from rlpipe.config.draft import DraftConfig
from rlpipe.drafts.loss import mtp_loss
draft, target = torch.randn(2, 5, 3, 7, generator=torch.Generator().manual_seed(0))
mask = torch.ones(5, 3, dtype=torch.bool)
loss, stats = mtp_loss(DraftConfig(objective="squared").supervised, draft, target, mask=mask)
rejected = 1 - torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)
torch.testing.assert_close(loss, rejected.square().mean())
"""

DRAFTER = '''
"""The last token, again and again."""
from rlpipe.drafts.kinds.base import DrafterFunctions
DRAFTER = DrafterFunctions(guess=lambda tokens, count, spec: tokens[-1:].repeat(count))
'''
DRAFTER_ROWS = {
    "config/drafters.py": [
        ('    SUFFIX = "suffix"', '    ECHO = "echo"'),
        ("    Drafter.SUFFIX: DrafterKind", '    Drafter.ECHO: DrafterKind(title="echo", has_model=False),'),
    ],
    "drafts/kinds/__init__.py": [
        ("from rlpipe.drafts.kinds.base", "from rlpipe.drafts.kinds import echo"),
        ("    Drafter.SUFFIX:", "    Drafter.ECHO: echo.DRAFTER,"),
    ],
}
DECODE = """
import sys
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.drafters import Drafter
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.embedded import EmbeddedEngine
from tests.helpers.engines import generate, request
outputs = []
name, path = ("mix", sys.argv[2]) if sys.argv[2:] else ("echo", "")
for spec in (SpecConfig(mode="greedy", drafter=name, draft_path=path), SpecConfig(mode="none")):
    engine = EmbeddedEngine(RolloutConfig(max_running=8, max_context=128, device="cpu"), spec, sys.argv[1])
    outputs += generate(engine, request(1, [5, 9, 2, 33], max_new_tokens=24, temperature=0.0))
    engine.close()
assert outputs[0].output_ids.tolist() == outputs[1].output_ids.tolist()
assert outputs[0].spec.proposed and not outputs[1].spec.proposed
assert Drafter(name).kind.title == name
"""

MODEL_DRAFTER = '''
"""A linear layer that reads a layer of the target and the token; the target's head predicts."""
import json
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from rlpipe.config.paths import resolve, resolve_model
from rlpipe.drafts.kinds.base import DrafterFunctions
from rlpipe.models.checkpoint import read_config, read_weights
PREFIX = "mix."

class Shape:
    def __init__(self, target):
        self.layers, self.vocab = [target["num_hidden_layers"] - 2], target["vocab_size"]

class Mix(torch.nn.Module):
    """The module that is trained."""
    prefix = PREFIX
    def __init__(self, target, weights):
        super().__init__()
        width = target["hidden_size"]
        self.shape, self.fc = Shape(target), torch.nn.Linear(2 * width, width, bias=False)
        torch.nn.init.zeros_(self.fc.weight)
        self.norm = torch.nn.Parameter(weights["model.norm.weight"].clone())
        self.register_buffer("head", weights["lm_head.weight"], persistent=False)
    def unroll(self, features, embeddings):
        states = [features]
        for embedded in embeddings:
            states.append(states[-1] + self.fc(torch.cat((states[-1], embedded), -1)))
        return states[1:]
    def logits(self, states):
        return torch.nn.functional.rms_norm(states, states.shape[-1:], self.norm, 1e-6) @ self.head.T
    def save(self, path, weights):
        Path(path).mkdir(parents=True, exist_ok=True)
        save_file({n: w.detach().contiguous() for n, w in weights.items()}, f"{path}/model.safetensors")
        Path(path, "config.json").write_text(json.dumps({"architectures": ["Mix"]}))

def make(config, start, trajectories=(), *, train_alongside):
    path = resolve_model(config.model.path)
    target, weights = read_config(path), read_weights(path)
    draft = Mix(target, weights)
    if start:
        draft.load_state_dict(load_file(f"{resolve(start)}/model.safetensors"))
    return train_alongside(config, draft, target, weights=weights)

DRAFTER = DrafterFunctions(make_trainer=make)
'''
ENGINE_DRAFT = '''
"""The linear layer in the embedded engine."""
import torch
from safetensors.torch import load_file
from rlpipe.drafts.kinds.mix import PREFIX, Shape
from rlpipe.rollout.embedded.span import flat_index

class MixDraft:
    """What drafts."""
    prefix, ids = PREFIX, None
    def __init__(self, target, weights):
        self.layers, self._weights = Shape(target).layers, weights
        self.shapes = {PREFIX + name: tuple(w.shape) for name, w in weights.items()}
    @classmethod
    def read(cls, path, target):
        return cls(target, load_file(f"{path}/model.safetensors"))
    def attach(self, model):
        self.load(model, self._weights)
    def load(self, model, weights):
        self._fc, self._norm = model.getter(weights)("fc.weight"), model.getter(weights)("norm")
    def fuse(self, features):
        return features[0]
    def step(self, model, tokens, state, spans, selects):
        state = state + torch.cat((state, model.embedding[tokens]), -1) @ self._fc.T
        return state if selects is None else state[flat_index(spans, selects)]
    def logits(self, model, state):
        return model.logits(torch.nn.functional.rms_norm(state, state.shape[-1:], self._norm, 1e-6))
'''
MODEL_DRAFTER_ROWS = {
    "config/drafters.py": [
        ('    SUFFIX = "suffix"', '    MIX = "mix"'),
        (
            "    Drafter.SUFFIX: DrafterKind",
            """
    Drafter.MIX: DrafterKind(
        title="mix",
        has_directory=True,
        sglang="EAGLE3",
        served=ServedDraft(
            prefix="mix.",
            tables=lambda *_: [
                ("", "", [Part((), ("fc.weight",)), Part((), ("norm",), served="norm.weight")]),
            ],
            shared=(EMBEDDING,),
        ),
    ),""",
        ),
    ],
    "drafts/kinds/__init__.py": [
        ("from rlpipe.drafts.kinds.base", "from rlpipe.drafts.kinds import mix"),
        ("    Drafter.SUFFIX:", "    Drafter.MIX: mix.DRAFTER,"),
    ],
    "rollout/embedded/drafters.py": [
        ("from rlpipe.rollout.embedded.model", "from rlpipe.rollout.embedded.mix import MixDraft"),
        ("    Drafter.EAGLE3:", "    Drafter.MIX: MixDraft.read,"),
    ],
}
SERVE = """
import sys
import torch
from rlpipe.config.drafters import Drafter
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.weights.canary import Shard, compare, server_parts
from rlpipe.weights.fingerprint import fingerprints
model, draft = sys.argv[1:]
hf_config = read_config(model)
weights = read_weights(model) | {"mix." + name: w for name, w in read_weights(draft).items()}
shard = Shard(kv_heads=hf_config["num_key_value_heads"])
parts = lambda: server_parts(weights, shard, hf_config, dtype=torch.float32, drafter=Drafter("mix"))
served = fingerprints(parts(), on_gpu=False)
assert {n for n in served if n.startswith("draft.")} == {
    "draft.fc.weight", "draft.norm.weight", "draft.model.embed_tokens.weight"}
assert weights["mix.fc.weight"].any()  # it learned
weights["mix.fc.weight"][0, 0] += 1
assert compare(fingerprints(parts(), on_gpu=False), served).draft == ["draft.fc.weight"]
"""

ENGINE = '''
"""Says one token, again and again."""
from rlpipe.rollout.engine import EngineStats
from rlpipe.types import FinishReason, GenerateResult, SpecCounts
class ConstantEngine:
    def __init__(self, config, spec, model_path, *, log_dir, on_event):
        self.config, self.version = config, 0
    async def generate(self, request):
        n = request.sampling.max_new_tokens
        counts = {"entropies": [0.0] * n, "versions": [self.version] * n}
        said = {"request_id": request.request_id, "output_ids": [7] * n, "logprobs": [0.0] * n}
        return GenerateResult(**said, **counts, finish_reason=FinishReason.LENGTH, spec=SpecCounts())
    def update_weights(self, weights, version):
        self.version = version
    def stats(self):
        return EngineStats(policy_version=self.version)
    def abort(self, request_ids=None): pass
    def end_session(self, session_id): pass
    def pause(self): pass
    def resume(self): pass
    def close(self): pass
'''
ENGINE_EDITS = {
    "rlpipe/config/rollout.py": {
        '    EMBEDDED = "embedded"': '    CONSTANT = "constant"\n    EMBEDDED = "embedded"'
    },
    "rlpipe/actors/engines.py": {
        "from rlpipe.rollout.engine import Engine\n": (
            "from rlpipe.rollout.constant import ConstantEngine\nfrom rlpipe.rollout.engine import Engine\n"
        ),
        "    EngineKind.EMBEDDED: ": (
            "    EngineKind.CONSTANT: EngineEntry(make=ConstantEngine),\n    EngineKind.EMBEDDED: "
        ),
    },
}

TRANSPORT = '''
"""Tensors by value, in the bodies of requests."""
from rlpipe.weights.buckets import serialize
from rlpipe.weights.transports.base import Transport
class BodyTransport(Transport):
    def __init__(self, session):
        self._session = session
    async def send(self, client, update):
        session = self._session
        buckets = session.buckets(update.weights)
        async with session.open(client):
            for bucket, body in session.requests(buckets, version=update.version, flush=update.flush):
                body["serialized_named_tensors"] = [serialize(bucket)]
                await client.post("/update_weights_from_tensor", body, session.timeout)
'''
TRANSPORT_EDITS = {
    "rlpipe/config/sglang.py": {'    DISK = "disk"': '    BODY = "body"\n    DISK = "disk"'},
    "rlpipe/weights/transports/__init__.py": {
        "from rlpipe.weights.transports.disk ": (
            "from rlpipe.weights.transports.body import BodyTransport\nfrom rlpipe.weights.transports.disk "
        ),
        "    WeightTransfer.DISK: ": "    WeightTransfer.BODY: BodyTransport,\n    WeightTransfer.DISK: ",
    },
}
SEND = """
import sys
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import SglangConfig
settings = SglangConfig(weight_transfer="body", bucket_mb=1)
config = RolloutConfig(engine="sglang", device="cpu", sglang=settings)

import asyncio
import base64
import pickle
from pathlib import Path
import torch
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_weights
from rlpipe.weights.canary import rank_fingerprints
from rlpipe.weights.sync import WeightSync
from rlpipe.weights.transports.base import WeightUpdate

class Server:
    def __init__(self):
        self.weights, self.paths, self.versions = {}, [], []
    async def post(self, path, body, timeout=None):
        self.paths.append(path)
        if path == "/update_weights_from_tensor":
            self.weights |= pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
            self.versions.append(body["weight_version"])
    async def read(self, path, body):
        drafter, model = sync.session.drafter, sync.session.hf_config
        (sums,) = rank_fingerprints(self.weights, config, model, drafter=drafter, on_gpu=False)
        return {"ranks": [{"parallelism_info": [{"tp_rank": 0}], "checksums": sums}]}

model, server = Path(sys.argv[1]), Server()
weights = read_weights(model)
sync = WeightSync(config, SpecConfig(), model, on_gpu=False, folder=Path("out"))
asyncio.run(sync.send(server, WeightUpdate(weights=weights, version=3, flush=False)))
assert server.weights.keys() == weights.keys()
assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights.items())
assert server.versions == [None] * (len(server.versions) - 1) + ["3"] and len(server.versions) > 5
begin, *loads, end = server.paths
assert {*loads} == {"/update_weights_from_tensor"}
assert (begin, end) == ("/begin_weight_update", "/end_weight_update")

def check():
    return asyncio.run(sync.check(server, sync.checksums(weights), draft=True))

assert check().passed
server.weights["model.norm.weight"] = weights["model.norm.weight"] + 1
assert check().target == ["model.norm.weight"]
"""

FAMILY = """
from rlpipe.models.base import Family
FAMILY = Family(name="biased", qkv_bias=True, output_bias=False)
"""
FAMILY_ROWS = {
    "models/__init__.py": [
        ("from rlpipe.models.base import", "from rlpipe.models import biased"),
        ('    "deepseek_v3": ', '    "biased": biased.FAMILY,'),
    ]
}
SAME = """
import sys
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.embedded import EmbeddedEngine
from tests.helpers.engines import generate, request
outputs = []
for model in sys.argv[1:]:
    config = RolloutConfig(max_running=8, max_context=128, device="cpu")
    engine = EmbeddedEngine(config, SpecConfig(mode="none"), model)
    outputs += generate(engine, request(1, [5, 9, 2, 33], max_new_tokens=24, temperature=0.0))
    engine.close()
assert outputs[0].output_ids.tolist() == outputs[1].output_ids.tolist()
assert outputs[0].logprobs.tolist() == outputs[1].logprobs.tolist()
"""

ENVIRONMENT_EDITS = {
    "rlpipe/config/env.py": {'    TOOLS = "tools"': '    SPELLING = "spelling"\n    TOOLS = "tools"'},
    "rlpipe/envs/__init__.py": {
        "def _make_swe(": (
            "def _make_spelling(config: EnvConfig, seed: int) -> Suite:\n"
            "    from rlpipe.envs.spelling import Spelling\n"
            "    from rlpipe.envs.user_suite import ClassSuite\n\n"
            "    return ClassSuite(Spelling, config, seed)\n\n\n"
            "def _make_swe("
        ),
        "    EnvName.TOOLS: ": (
            "    EnvName.SPELLING: Environment(check=lambda config: None, make=_make_spelling),\n"
            "    EnvName.TOOLS: "
        ),
    },
}
PLAY = """
import rlpipe
from rlpipe.envs import check_environment, make_suite
config = rlpipe.compose(["+recipe=reasoning_rl", "env=spelling", "env.held_out_size=7"])
check_environment(config.env)
suite = make_suite(config.env, seed=3)
assert list(suite.splits()) == ["held_out"] and len(suite.instance_ids("held_out")) == 7
episode = suite.episode(suite.instance_ids("train")[0])
assert episode.word in episode.messages()[0]["content"]
assert (episode.step(episode.word[::-1]), episode.step("")) == (1.0, 0.0)
"""

METRIC_ROW = {
    "metrics/catalogue.toml": [
        (
            '  ["critic/score", ',
            '  ["critic/surprise", "average", "1", "Share of rewards that nobody foresaw."],',
        )
    ]
}
EMIT = """
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.values import Mean
with MetricsBus([]) as bus:
    for value, weight in ((0.5, 1), (0.8, 2)):
        bus.emit(1, {"critic/surprise": Mean(value * weight, weight)})
    record = bus.commit(1)
assert abs(record["critic/surprise"] - 0.7) < 1e-9, record
"""
PAGE = "import runpy; runpy.run_module('rlpipe.metrics.names', run_name='__main__')"
RUN = "import sys; from rlpipe.cli.run import main; sys.exit(main())"


@pytest.fixture
def package(tmp_path):
    shutil.copytree(ROOT / "rlpipe", tmp_path / "rlpipe", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def add_rows(package, rows):
    """Insert a line before the one line that starts with each anchor."""
    for name, edits in rows.items():
        file = package / "rlpipe" / name
        lines = file.read_text().split("\n")
        for anchor, row in edits:
            (index,) = (i for i, line in enumerate(lines) if line.startswith(anchor))
            lines.insert(index, row)
        file.write_text("\n".join(lines))


def run(folder, code, *arguments):
    env = environment() | {"PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def unchanged(folder, code, *arguments):
    """The error of the code on rlpipe as it is, in a process that has its imports already."""

    def work():
        os.chdir(folder)
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = ["-c", *arguments]
        exec(code, {"__name__": "__main__"})

    assert in_a_process(work)
    return (folder / "stderr").read_text()


def test_a_function_and_its_rows_are_an_objective(package):
    assert "squared" in unchanged(package, CHECK)
    add_rows(package, OBJECTIVE_ROWS)
    done = run(package, CHECK)
    assert done.returncode == 0, done.stderr


def test_a_file_and_its_rows_are_a_drafter(package):
    model = str(write_random_checkpoint(package / "model", "qwen2"))
    assert "echo" in unchanged(package, DECODE, model)
    (package / "rlpipe/drafts/kinds/echo.py").write_text(DRAFTER)
    add_rows(package, DRAFTER_ROWS)
    done = run(package, DECODE, model)
    assert done.returncode == 0, done.stderr


def test_a_small_model_for_trainer_and_engine_is_a_drafter_that_learns_drafts_and_is_checked(package):
    """It adapts, is trained together with the policy, drafts losslessly, and the canary knows its weights."""
    for shipped in ("configs", "models", "data"):
        (package / shipped).symlink_to(ROOT / shipped)
    (package / "rlpipe/drafts/kinds/mix.py").write_text(MODEL_DRAFTER)
    (package / "rlpipe/rollout/embedded/mix.py").write_text(ENGINE_DRAFT)
    add_rows(package, MODEL_DRAFTER_ROWS)
    few = [f"adapt.{name}" for name in ("prompts=4", "samples=1", "batch=4", "eval_prompts=1")]
    adapt = ["+recipe=mtp_adapt", "adapt.drafter=mix", "adapt.out_of_domain=[]", "draft.objective=kl", *few]
    done = run(package, RUN, *adapt, "run.dir=adapted", "run.steps=4", "adapt.eval_first=false")
    assert done.returncode == 0, done.stdout + done.stderr
    draft = ["spec.drafter=mix", "spec.draft_path=adapted/draft", "draft.train=online", "draft.objective=kl"]
    job = ["+recipe=swe_rl", "cluster=inline", *draft, *SMALL, "run.dir=out", "run.steps=1"]
    done = run(package, RUN, *job)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads((package / "out/metrics.jsonl").read_text().splitlines()[-1])
    assert last["mtp/grad_norm"] > 0 and "spec/acceptance_rate" in last
    checkpoint = package / "out/checkpoints/step_1"
    for code, model in ((SERVE, checkpoint / "hf"), (DECODE, ROOT / "models/tiny")):
        done = run(package, code, str(model), str(checkpoint / "draft"))
        assert done.returncode == 0, done.stderr


def edit(package, edits):
    """Replace texts that occur once, by file."""
    for name, replacements in edits.items():
        file = package / name
        for old, new in replacements.items():
            assert file.read_text().count(old) == 1, old
            file.write_text(file.read_text().replace(old, new))


def test_a_file_a_name_and_a_row_are_a_rollout_engine(package):
    for shipped in ("configs", "models", "data"):
        (package / shipped).symlink_to(ROOT / shipped)
    (package / "rlpipe/rollout/constant.py").write_text(ENGINE)
    edit(package, ENGINE_EDITS)
    job = ["+recipe=swe_rl", "cluster=inline", "rollout.engine=constant", "spec.mode=none", *SMALL]
    done = run(package, RUN, *job, "run.dir=out", "run.steps=1", "env.max_turns=2")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (package / "out/rollouts").glob("*.jsonl")
    for played in map(json.loads, file.read_text().splitlines()):
        place = 0
        for version, count in played["policy_versions"]:
            assert version < 0 or played["tokens"][place : place + count] == [7] * count
            place += count


def test_a_file_a_name_and_a_row_are_a_weight_transport(package):
    """It brings a model to a server bit for bit, and the canary sees one tensor that differs."""
    model = str(ROOT / "models/tiny")
    assert "'body'" in unchanged(package, SEND, model)
    (package / "rlpipe/weights/transports/body.py").write_text(TRANSPORT)
    edit(package, TRANSPORT_EDITS)
    done = run(package, SEND, model)
    assert done.returncode == 0, done.stderr


def test_a_file_and_a_row_are_a_model_family(package):
    """A checkpoint of Qwen2 under the new name decodes as under its own."""
    known = write_random_checkpoint(package / "known", "qwen2")
    named = package / "named"
    shutil.copytree(known, named)
    (named / "config.json").write_text(json.dumps(read_config(known) | {"model_type": "biased"}))
    with pytest.raises(ValueError, match="model_type='biased' is not supported"):
        read_architecture(read_config(named))
    (package / "rlpipe/models/biased.py").write_text(FAMILY)
    add_rows(package, FAMILY_ROWS)
    done = run(package, SAME, str(known), str(named))
    assert done.returncode == 0, done.stderr


def test_a_file_a_name_a_row_and_a_group_of_settings_are_an_environment(package):
    """That of docs/own_environment.md, shipped: it is chosen by env=NAME and reads its options."""
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/own_environment.md").read_text(), flags=re.DOTALL
    )
    shutil.copytree(ROOT / "configs", package / "configs")
    assert "spelling" in unchanged(package, PLAY)
    (package / "rlpipe/envs/spelling.py").write_text(code)
    (package / "configs/env/spelling.yaml").write_text("# @package env\nname: spelling\nmax_turns: 1\n")
    edit(package, ENVIRONMENT_EDITS)
    done = run(package, PLAY)
    assert done.returncode == 0, done.stderr


def test_a_row_is_a_metric(package):
    """It is reduced by its kind and stands on the page; without the row its name is refused."""
    assert "critic/surprise" in unchanged(package, EMIT)
    add_rows(package, METRIC_ROW)
    done = run(package, EMIT)
    assert done.returncode == 0, done.stderr
    assert "`critic/surprise`" in run(package, PAGE).stdout
