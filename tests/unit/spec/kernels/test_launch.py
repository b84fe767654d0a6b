"""What the kernels refuse, and where triton is imported. The kernels themselves: tests/integration."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlpipe.spec import kernels
from tests.helpers.cli import environment
from tests.helpers.kernel_cases import RULES, random_case

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("draft_tokens", lambda x: x.int(), r"draft_tokens is \(2, 3\) torch.int32; it must be \[B, gamma\]"),
        ("draft_tokens", lambda x: x[:, :2], r"target_probs is \(2, 4, 5\); .* must be \(2, 3, 5\)"),
        ("target_probs", lambda x: x[0], r"target_probs is \(4, 5\); it must be \[B, gamma \+ 1, V\]"),
        ("target_probs", lambda x: x[:, :, :0], r"target_probs is \(2, 4, 0\); .* V > 0"),
        ("target_probs", lambda x: x.long(), r"target_probs is torch.int64; it must be a floating-point"),
        ("target_probs", lambda x: x.to("meta"), "target_probs is on meta, draft_tokens on cpu"),
        ("accept_uniforms", lambda x: x.float(), "accept_uniforms is torch.float32: the 24 bits"),
        ("residual_uniforms", lambda x: x.bfloat16(), "residual_uniforms is torch.bfloat16: the 24 bits"),
        ("residual_uniforms", lambda x: x[:1], r"residual_uniforms is \(1,\); .* must be \(2,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_what_was_given(rule, name, change, message):
    case = random_case(2, 3, 5)
    case = case.with_(**{name: change(getattr(case, name))})
    with pytest.raises(ValueError, match=message):
        getattr(kernels, rule)(*case.arguments(rule))


def test_draft_probabilities_over_another_vocabulary_are_refused():
    case = random_case(2, 3, 5)
    with pytest.raises(ValueError, match=r"draft_probs is \(2, 3, 4\); .* must be \(2, 3, 5\)"):
        kernels.verify_chain(*case.with_(draft_probs=case.draft_probs[:, :, :4]).arguments("verify_chain"))


PROGRAM = """
import sys, torch, rlpipe.spec, rlpipe.spec.verify, rlpipe.spec.kernels as kernels
print("triton" in sys.modules)
arguments = [torch.zeros(1, 1).long(), torch.ones(1, 1, 1), torch.ones(1, 2, 1), torch.zeros(1, 1).double()]
arguments.append(arguments[3][0])
{prepare}
try:
    kernels.verify_chain(*arguments)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("", "needs a CUDA device, the tensors are on cpu: move them to one, use backend="),
        ("sys.modules['triton'] = None", "needs the package triton, which is not installed"),
    ],
)
def test_triton_is_imported_by_the_first_call_which_says_why_it_cannot_run(prepare, message):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(prepare=prepare)],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    imported, error = result.stdout.strip().split("\n")
    assert imported == "False", result.stderr
    assert message in error
