"""Checkpoints of a distributed optimizer: no rank receives another's share, and other sizes continue them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlpipe.config.algo import AlgoConfig
from rlpipe.config.trainer import Precision, TrainerConfig
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import Run, make_batch, make_trainer, meet, train
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

ALONE = TrainerConfig(lr=1e-2, eps=1e-3, distributed_optimizer=True)
TWO = replace(ALONE, dp=2)
COLLECTIVES = ("all_gather", "gather", "broadcast", "all_gather_into_tensor", "_all_gather_base")


def received_while_saving(rank, world_size, folder, path):
    """Elements that collectives of tensors gave this rank while it saved, and what its own shares hold."""
    torch.set_num_threads(1)
    master = meet(rank, world_size, folder / "address")
    config = replace(TWO, precision=Precision.BF16)
    trainer = make_trainer(path, config, rank=rank, world_size=world_size, master=master)
    trainer.train_step(make_batch(make_groups(0, vocab=61), AlgoConfig(), 2))

    counts = []
    for name in COLLECTIVES:
        if (real := getattr(dist, name, None)) is not None:
            setattr(dist, name, _counting(real, counts))
    trainer.save(folder / "saved")
    elements = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    trainer.close()
    return sum(counts), elements


def _counting(collective, counts):
    def counted(received, *args, **options):
        tensors = received if isinstance(received, list) else [received]
        # Objects travel as bytes: the description of the checkpoint.
        counts.extend(t.numel() for t in tensors if isinstance(t, torch.Tensor) and t.dtype.is_floating_point)
        return collective(received, *args, **options)

    return counted


def test_no_state_of_another_rank_is_gathered_to_save(tmp_path):
    """Megatron's own format gave each rank master weights and two moments of all: 3 x the parameters."""
    path = write_random_checkpoint(tmp_path / "model", "mimo", vocab=61)
    for received, elements in run_ranks(received_while_saving, 2, tmp_path, path):
        assert elements > 1000
        assert received < elements // 100


@pytest.mark.parametrize("model", ["mimo", "qwen3_moe", "qwen3_next"])
def test_shares_of_two_ranks_are_continued_by_one_and_by_tensor_parallel_ranks(tmp_path, model):
    """Fused matrices, experts and delta nets: shares end anywhere in a matrix."""
    path, algo = write_random_checkpoint(tmp_path / "model", model, vocab=61), AlgoConfig()
    groups = [make_groups(seed, vocab=61) for seed in range(3)]
    saved = tmp_path / "saved"

    def run(config, work, **files):
        return Run(path=path, config=config, algo=algo, groups=work, **files)

    sizes = {"tp": replace(ALONE, tp=2), "dp": TWO}
    if model == "qwen3_moe":
        sizes["ep"] = replace(TWO, ep=2)
    begun = {"whole": run(TWO, groups), "begun": run(TWO, groups[:2], save=saved)}
    begun |= {name: run(config, groups[2:], load=saved) for name, config in sizes.items()}
    found = run_ranks(train, 2, tmp_path, begun)[0]
    found |= train(0, 1, tmp_path, {"alone": run(ALONE, groups[2:], load=saved)})

    for name in ("alone", *sizes):
        for key, weight in found["whole"]["weights"].items():
            np.testing.assert_allclose(found[name]["weights"][key], weight, rtol=2e-3, atol=2e-5, err_msg=key)


def test_gradients_are_reduced_while_the_backward_pass_continues(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", "mimo", vocab=61, layers=3)
    for order in run_ranks(order_of_reductions, 2, tmp_path, path):
        first, *_, last = [n for n, name in enumerate(order) if name == "backward of layer 0"]
        assert "reduction" not in order[:first]  # more micro-batches follow
        assert "reduction" in order[first:last]


def order_of_reductions(rank, world_size, folder, path):
    """In which order backward passes of layers end and reductions start, with a bucket for each layer."""
    from megatron.core.distributed import distributed_data_parallel as ddp

    # The default of 40 million parameters makes one bucket of a small model.
    real = ddp.DistributedDataParallel.__init__

    def with_small_buckets(self, config, ddp_config, *args, **options):
        ddp_config.bucket_size = 1
        real(self, config, ddp_config, *args, **options)

    ddp.DistributedDataParallel.__init__ = with_small_buckets
    master = meet(rank, world_size, folder / "address")
    trainer = make_trainer(path, TWO, rank=rank, world_size=world_size, master=master)
    order = []
    for group in trainer._wrapped.bucket_groups:
        start = group.start_grad_sync
        group.start_grad_sync = lambda *a, start=start, **o: (order.append("reduction"), start(*a, **o))
    for number, layer in enumerate(trainer.model.decoder.layers):
        name = f"backward of layer {number}"
        layer.register_full_backward_hook(lambda *_, name=name: order.append(name))
    trainer.train_step(make_batch(make_groups(0, vocab=61), AlgoConfig(), 2))
    trainer.close()
    return order
