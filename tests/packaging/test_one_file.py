"""What CONTRIBUTING promises of objectives: one file that is there is enough."""

import shutil
import subprocess
import sys

import pytest

from tests.helpers.cli import ROOT, environment

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


@pytest.fixture
def package(tmp_path):
    shutil.copytree(ROOT / "rlpipe", tmp_path / "rlpipe", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(folder, code):
    env = environment() | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


def test_a_file_among_the_objectives_is_an_objective(package):
    assert "squared" in run(package, CHECK).stderr
    (package / "rlpipe/drafts/objectives/supervised/squared.py").write_text(OBJECTIVE)
    done = run(package, CHECK)
    assert done.returncode == 0, done.stderr
