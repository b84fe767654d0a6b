"""What CONTRIBUTING promises of objectives and drafters: one file that is there is enough."""

import shutil
import subprocess
import sys

import pytest

from tests.helpers.cli import ROOT, environment
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
        timeout=120,
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
