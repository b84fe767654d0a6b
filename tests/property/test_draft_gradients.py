"""Gradients of the draft are those of plain autograd, a trajectory at a time, however a batch is laid out.

Batches have several turns, some shorter than the draft is deep, and common prefixes; they are packed under
any budget, run by 1, 2 or 4 context parallel ranks, with and without recomputation, by one layer and by one
for each depth. The bugs that other frameworks have had with MTP are planted here, and seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import megatron.core.tensor_parallel as tensor_parallel
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rlpipe.batching.micro_batch import Branch
from rlpipe.batching.packing import pack
from rlpipe.config.draft import DraftConfig, DraftTrain
from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.drafts import megatron_draft
from rlpipe.trainer import draft
from rlpipe.trainer.context import ContextLayout
from rlpipe.trainer.draft import DraftPasses
from rlpipe.types import Trajectory
from tests.helpers.draft_oracle import draft_numerator, read_layers
from tests.helpers.played_ranks import PlayedRanks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import make_trainer
from tests.property.test_draft_labels import batches

pytestmark = pytest.mark.property
VOCAB = 61


@dataclass(slots=True, kw_only=True)
class Case:
    """A batch, and how the trainer is to run it."""

    trajectories: list[Trajectory]
    depths: int
    budget: int
    share: bool
    ranks: int
    recompute: bool
    objective: DraftObjective


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Batches of a small vocabulary under every layout."""
    trajectories, depths, budget, _, share, ranks = draw(batches(vocab=VOCAB))
    return Case(
        trajectories=trajectories,
        depths=min(depths, 3),  # the shortest trajectory has four tokens
        budget=budget,
        share=share,
        ranks=ranks,
        recompute=draw(st.booleans()),
        objective=draw(st.sampled_from([DraftObjective.HARD_CE, DraftObjective.E2E_TV])),
    )


class Draft:
    """A policy in training with a draft of some layers, and the same in transformers."""

    def __init__(self, path: Any, layers: int) -> None:
        write_random_checkpoint(path, "mimo", vocab=VOCAB, head_scale=0.5, mtp_layers=layers)
        self.trainer = make_trainer(path, mtp=DraftConfig(train=DraftTrain.ONLINE, depths=1))
        self.model, self.layers = AutoModelForCausalLM.from_pretrained(path), read_layers(path)

    def gradients(self, case: Case) -> dict[str, torch.Tensor]:
        """Summed over micro-batches and ranks, by the names of the files; of the backbone, too."""
        trainer, policy = self.trainer, self.trainer.model
        passes = trainer._passes
        config = DraftConfig(depths=case.depths, objective=case.objective)
        drafting = DraftPasses(
            config, trainer._runtime, passes, group=trainer._dp_group, windows=None, updates=1, seed=0
        )
        packed = pack(case.trajectories, None, case.budget, share_prefixes=case.share)
        trainer._wrapped.zero_grad_buffer()
        ranks = PlayedRanks(case.ranks)
        for micro in (micro for mini in packed.minibatches for shard in mini.shards for micro in shard):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(policy.pg_collection, "cp", ranks)
                seen = ranks.run(lambda micro=micro: passes.hidden(policy, micro), patch)
                patch.setattr(policy.config, "recompute_granularity", "full" if case.recompute else None)
                for hidden, _, layout in seen:
                    loss, _ = drafting.loss(
                        policy, micro, hidden=hidden, layout=layout, temperature=0.7, updates=0
                    )
                    if loss.requires_grad:
                        loss.backward()
        return self._by_name()

    def _by_name(self) -> dict[str, torch.Tensor]:
        """Gradients, as the trainer would export weights."""
        parameters = list(self.trainer.model.parameters())
        weights = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(parameter.main_grad)
            exported = {name: tensor.clone() for name, tensor in self.trainer.export_weights().items()}
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)
        return exported

    def expected(self, case: Case) -> dict[str, torch.Tensor]:
        """The same of the layers, by autograd."""
        self.layers.zero_grad()
        config = DraftConfig(depths=case.depths, objective=case.objective)
        loss, stats = draft_numerator(self.model, self.layers, case.trajectories, config, 0.7)
        if stats.weight:
            loss.backward()
        return {
            f"model.mtp_layers.{name}": torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.layers.named_parameters()
        }

    def check(self, case: Case) -> None:
        """The draft learns what it should and nothing else learns anything."""
        found, expected = self.gradients(case), self.expected(case)
        size = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in found.items():
            wanted = expected.get(name, torch.zeros_like(gradient))
            torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-5 * size, msg=name)


@pytest.fixture(scope="module", params=[1, 2], ids=["one layer", "two layers"])
def drafts(request, tmp_path_factory):
    made = Draft(tmp_path_factory.mktemp("model"), request.param)
    yield made
    made.trainer.close()


FEW = settings(max_examples=30, deadline=None)


@FEW
@given(cases())
def test_gradients_are_those_of_plain_autograd_under_any_layout(drafts, case):
    drafts.check(case)


def shifted_twice(patch: Any) -> None:
    """Who makes the mask shifts it, and so does who derives the labels."""
    real = draft.depth_targets
    patch.setattr(draft, "depth_targets", lambda t, s, depths: real(t.roll(-1, 1), s.roll(-1, 1), depths))


def mask_of_the_response(patch: Any) -> None:
    """Places in the response are read as places in the whole text, prompt included."""
    real = draft.draft_batch

    def wrong(micro: Any, *options: Any) -> Any:
        first = np.where(micro.mask > 0, micro.indices, np.iinfo(np.int64).max).min(1, keepdims=True)
        return real(replace(micro, indices=micro.indices - first + 1), *options)

    patch.setattr(draft, "draft_batch", wrong)


def head_learns(patch: Any) -> None:
    """The loss of the draft reaches the head of the policy."""
    patch.setattr(draft, "linear_mtp_loss", partial(draft.linear_mtp_loss, train_head=True))


def labels_over_packing(patch: Any) -> None:
    """Labels go on over the end of a packed text, into the next one."""
    real = draft.depth_targets

    def wrong(tokens: torch.Tensor, sampled: torch.Tensor, depths: int) -> Any:
        read = sampled.clone()
        read[1:, 0] = True
        found = real(tokens.view(1, -1), read.view(1, -1), depths)
        return replace(found, turn_starts=found.turn_starts.view(tokens.shape))

    patch.setattr(draft, "depth_targets", wrong)


def keys_over_packing(patch: Any) -> None:
    """The layer is not given where one packed text ends, and attends to the one before."""
    real = draft.draft_batch

    def wrong(*given: Any) -> Any:
        found = real(*given)
        return found and replace(found, branches=[Branch(length=len(found.places), context=[])])

    patch.setattr(draft, "draft_batch", wrong)


def recomputation_drops_gradients(patch: Any) -> None:
    """No input of the layer needs a gradient, so its backward pass is never run again."""
    real = megatron_draft.draft_step

    def wrong(
        model: Any, depth: int, state: torch.Tensor, *, recompute: bool, **arguments: Any
    ) -> torch.Tensor:
        state = state.detach() if recompute else state
        return real(model, depth, state, recompute=recompute, **arguments)

    patch.setattr(megatron_draft, "draft_step", wrong)


def recomputation_reads_other_tokens(patch: Any) -> None:
    """What the layer runs again in the backward pass is not what it was given."""
    real, last = tensor_parallel.checkpoint, {}

    def wrong(run: Any, distribute: bool, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        last["embedded"] = embedded
        return real(lambda state, _: run(state, last["embedded"]), distribute, state, embedded)

    patch.setattr(tensor_parallel, "checkpoint", wrong)


def ranks_in_their_order(patch: Any) -> None:
    """What context parallel ranks hold is read as if it lay in order of the text."""
    patch.setattr(
        ContextLayout, "gather", lambda layout, hidden: layout._group.gather(hidden)[: layout._count]
    )


def chunks_end_at_their_rank(patch: Any) -> None:
    """A rank sees nothing of the tokens after its cut, which lie on another one."""

    def wrong(layout: ContextLayout, hidden: torch.Tensor) -> torch.Tensor:
        everything = hidden.new_zeros(layout._group.size() * len(hidden), hidden.shape[1])
        everything[layout.indices] = hidden
        return everything[: layout._count]

    patch.setattr(ContextLayout, "gather", wrong)


def every_rank_counts(patch: Any) -> None:
    """Each context parallel rank has the whole loss, and their gradients are summed."""
    real = DraftPasses.loss

    def wrong(self: DraftPasses, policy: Any, *arguments: Any, **options: Any) -> Any:
        loss, stats = real(self, policy, *arguments, **options)
        return loss * policy.pg_collection.cp.size(), stats

    patch.setattr(DraftPasses, "loss", wrong)


SHIPPED_BUGS: dict[str, list[Callable[[Any], None]]] = {  # where: plants that do what it did
    "double shift, miles#2215": [shifted_twice],
    "wrong mask, verl#6432": [mask_of_the_response, head_learns],
    "packing, slime#1702": [labels_over_packing, keys_over_packing],
    "recompute, NeMo#2869, Megatron#3457": [
        recomputation_drops_gradients,
        recomputation_reads_other_tokens,
    ],
    "CP cut, Megatron#4933": [ranks_in_their_order, chunks_end_at_their_rank, every_rank_counts],
}
PLANTS = [
    pytest.param(bug, id=f"{where}: {bug.__name__}") for where, bugs in SHIPPED_BUGS.items() for bug in bugs
]


@pytest.mark.parametrize("bug", PLANTS)
def test_a_bug_that_others_shipped_is_seen(drafts, bug):
    """By a gradient that differs; a pass that fails on the way would be a mistake of the planted bug."""

    @settings(
        FEW, max_examples=100, derandomize=True, database=None, phases=[Phase.generate], print_blob=False
    )
    @given(cases())
    def check(case: Case) -> None:
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            drafts.check(case)

    with pytest.raises(AssertionError, match=r"^(model\.mtp_layers\.|lm_head)"):
        check()
