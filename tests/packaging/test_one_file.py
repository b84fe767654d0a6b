"""What CONTRIBUTING promises: an objective and a drafter are one file, an engine is one and two edits."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.helpers.cli import ROOT, SMALL, environment
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.packaging
OBJECTIVE = '''
"""Rejected mass squared."""
from rlpipe.drafts.objectives.supervised import Supervised
OBJECTIVE = Supervised(by_depth=lambda rows: (1 - rows.alpha) ** 2)
'''
CHECK = """
import torch
from rlpipe.config.mtp import MtpConfig
from rlpipe.drafts.loss import mtp_loss
draft, target = torch.randn(2, 5, 3, 7, generator=torch.Generator().manual_seed(0))
mask = torch.ones(5, 3, dtype=torch.bool)
loss, stats = mtp_loss(MtpConfig(objective="squared").supervised, draft, target, mask)
rejected = 1 - torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)
torch.testing.assert_close(loss, rejected.square().mean())
"""

DRAFTER = '''
"""The last token, again and again."""
from rlpipe.config.drafters import DrafterKind
DRAFTER = DrafterKind(title="echo", guess=lambda tokens, count, spec: tokens[-1:].repeat(count))
'''
DECODE = """
import sys
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import Drafter, SpecConfig
from rlpipe.rollout.embedded import EmbeddedEngine
from tests.helpers.engines import generate, request
outputs = []
for spec in (SpecConfig(mode="greedy", drafter="echo"), SpecConfig(mode="none")):
    engine = EmbeddedEngine(RolloutConfig(max_running=8, max_context=128, device="cpu"), spec, sys.argv[1])
    outputs += generate(engine, request(1, [5, 9, 2, 33], max_new_tokens=24, temperature=0.0))
    engine.close()
assert outputs[0].output_ids == outputs[1].output_ids
assert outputs[0].spec.proposed and not outputs[1].spec.proposed
assert Drafter("echo").kind.title == "echo"
"""

ENGINE = '''
"""Says one token, again and again."""
from rlpipe.rollout.engine import EngineStats
from rlpipe.types import FinishReason, GenerateResult, SpecCounts
class ConstantEngine:
    def __init__(self, config):
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
    "rlpipe/config/rollout.py": (
        '    EMBEDDED = "embedded"',
        '    CONSTANT = "constant"\n    EMBEDDED = "embedded"',
    ),
    "rlpipe/actors/engines.py": (
        "    from rlpipe.rollout.embedded import EmbeddedEngine\n",
        "    if config.rollout.engine is EngineKind.CONSTANT:\n"
        "        from rlpipe.rollout.constant import ConstantEngine\n\n"
        "        return ConstantEngine(config.rollout)\n"
        "    from rlpipe.rollout.embedded import EmbeddedEngine\n",
    ),
}
RUN = "import sys; from rlpipe.run import main; sys.exit(main())"


@pytest.fixture
def package(tmp_path):
    shutil.copytree(ROOT / "rlpipe", tmp_path / "rlpipe", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


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


def test_a_file_among_the_objectives_is_an_objective(package):
    assert "squared" in run(package, CHECK).stderr
    (package / "rlpipe/drafts/objectives/supervised/squared.py").write_text(OBJECTIVE)
    done = run(package, CHECK)
    assert done.returncode == 0, done.stderr


def test_a_file_among_the_drafters_is_a_drafter(package):
    model = str(write_random_checkpoint(package / "model", "qwen2"))
    assert "echo" in run(package, DECODE, model).stderr
    (package / "rlpipe/config/drafters/echo.py").write_text(DRAFTER)
    done = run(package, DECODE, model)
    assert done.returncode == 0, done.stderr


def test_a_file_and_two_edits_are_a_rollout_engine(package):
    for shipped in ("configs", "models", "data"):
        (package / shipped).symlink_to(ROOT / shipped)
    (package / "rlpipe/rollout/constant.py").write_text(ENGINE)
    for name, (before, after) in ENGINE_EDITS.items():
        text = (package / name).read_text()
        assert text.count(before) == 1
        (package / name).write_text(text.replace(before, after))
    job = ["+recipe=swe_rl", "cluster=inline", "rollout.engine=constant", "spec.mode=none", *SMALL]
    done = run(package, RUN, *job, "run.dir=out", "run.steps=1", "env.max_turns=2")
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (package / "out/rollouts").glob("*.jsonl")
    for played in map(json.loads, file.read_text().splitlines()):
        place = 0
        for version, count in played["policy_versions"]:
            assert version < 0 or played["tokens"][place : place + count] == [7] * count
            place += count
