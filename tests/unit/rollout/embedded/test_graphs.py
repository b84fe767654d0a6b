"""Passes in buffers of fixed shapes: what they say and cache is what passes of the true shapes do."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.rollout.embedded import attention, engine
from rlpipe.rollout.embedded.graphs import Buffers
from rlpipe.rollout.embedded.model import Model
from tests.helpers.engines import generate, running_engine
from tests.helpers.engines import request as asked
from tests.helpers.sglang import perturbed
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit
MODES = ("none", "rejection", "target_only", "block", "tree")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("mimo"))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Attention by the kernel that a GPU takes."""
    monkeypatch.setattr(attention, "NARROW_QUERIES", -1)


@pytest.fixture
def runs(monkeypatch, as_on_a_gpu):
    """Shapes of the passes that engines made from here on ran in buffers."""
    seen, call = [], Buffers.call
    monkeypatch.setattr(engine, "Model", lambda *a, **k: Model(*a, **k | {"graphs": True}))

    def called(self, function):
        seen.append((getattr(function, "func", function).__name__, len(self.tokens), self.span.batch))
        return call(self, function)

    monkeypatch.setattr(Buffers, "call", called)
    return seen


def played(checkpoint, mode):
    """Turns of conversations that come and go, around an update of the weights."""
    lengths, found = (3, 9, 17, 24, 6), []
    with running_engine(checkpoint, mode, max_running=7, max_context=256) as engine:
        for turn in range(3):
            found += generate(
                engine,
                *(
                    asked(
                        f"{turn} {n}",
                        [4 + n, 9, 5 + turn] * (1 + n),
                        session=str(n) if n % 2 else None,
                        max_new_tokens=length,
                    )
                    for n, length in enumerate(lengths)
                ),
            )
            engine.update_weights(perturbed(read_weights(checkpoint), 0.02, seed=turn), 1 + turn)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_turns_are_the_same_token_by_token(checkpoint, mode, request):
    request.getfixturevalue("as_on_a_gpu")
    plain = played(checkpoint, mode)
    runs = request.getfixturevalue("runs")
    padded = played(checkpoint, mode)
    passes = {"_forward_to_draft"} | ({"_draft"} if mode != "none" else set())
    assert {name for name, _, _ in runs} == passes and {rows for _, _, rows in runs} >= {1, 4, 7}
    for one, other in zip(plain, padded, strict=True):
        assert (
            one.output_ids.tolist() == other.output_ids.tolist()
            and one.versions.tolist() == other.versions.tolist()
        )
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


@torch.inference_mode()
def test_rows_of_the_padding_keep_what_they_hold(checkpoint, as_on_a_gpu):
    """Also after a batch that filled all rows, whose last one now holds an idle conversation."""
    model = Model(
        read_architecture(read_config(checkpoint)),
        read_weights(checkpoint),
        mtp=True,
        rows=4,
        slots=48,
        device=torch.device("cpu"),
        dtype=torch.float32,
        graphs=True,
    )
    for batch in (4, 3):
        held = torch.nn.init.normal_(model.cache[:, :, :4].clone())
        model.cache[:, :, :4] = held
        positions = torch.tensor([[7, 8]]).expand(batch, -1) + batch
        span = model.span(0, positions, 16, decoding=True)
        tokens = torch.arange(2 * batch)
        hidden, inputs = model.forward_to_draft(tokens, [span])
        drafted = model.draft(tokens, inputs, [span], [torch.ones(batch, dtype=torch.long)])
        assert len(hidden) == 2 * batch and len(drafted) == batch
        changed = (model.cache[:, :, :4] != held).any(-1)  # [layers, 2, rows, kv_heads, slots]
        rows, slots = changed.any((0, 1, 3, 4)), changed[:, :, 0].any((0, 1, 2))
        assert rows.tolist() == [True] * batch + [False] * (4 - batch)
        assert slots.nonzero().flatten().tolist() == positions[0].tolist()
    assert len(model._graphs._known) == 2  # one for the target, one for the draft, for both batches
    model.load(read_weights(checkpoint))
    assert not model._graphs._known


class _NoSync(TorchDispatchMode):
    """Fails at what a capture does not allow: values read by the host, shapes that depend on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_to_copy")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        moved = name == "_to_copy" and (kwargs or {}).get("device") is not None
        assert name not in self.FORBIDDEN or (name == "_to_copy" and not moved), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["none", "rejection", "tree"])
def test_a_pass_does_nothing_that_a_capture_forbids(checkpoint, mode, runs, monkeypatch):
    call = Buffers.call

    def watched(self, function):
        with _NoSync():
            return call(self, function)

    monkeypatch.setattr(Buffers, "call", watched)
    played(checkpoint, mode)
    assert runs
