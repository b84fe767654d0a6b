"""Makes the MTP layer that is shipped for SmolLM2, from answers of the model that are shipped with it.

    rlpipe fetch smollm2
    python -m recipes.smollm_rl.make_layer OUT [--steps 600]

OUT receives `mtp_layer.safetensors` and `draft_vocab.json`. The layer starts in closed form
(`rlpipe.convert.closed_form`) and then minimises the total variation between target and draft,

    1 - sum_v min(p_v, q_v)

summed over three depths: the probability that rejection sampling rejects a token. `mtp_adapt` trains the
layer of any model with the same loss. This script is faster, because the backbone never changes and the
draft's vocabulary is small. Hidden states are computed once. Only those rows of the head are multiplied that
belong to the draft's vocabulary; p = exp(logit - logsumexp) needs in addition only the target's logsumexp.
The shipped files came from these answers and this loss in two runs: 62 steps at a rate of 2e-3, then 547 at
3e-3.

Matrices are updated by Muon (orthogonalised momentum), vectors by AdamW.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlpipe.config.paths import resolve_model, shipped
from rlpipe.convert.closed_form import Sample, States, fit_input_proj, start_layer
from rlpipe.convert.gguf import quiet
from rlpipe.convert.samples import read_samples
from rlpipe.models.checkpoint import MTP_PREFIX

ROLLOUTS = "models/smollm2/rollouts.jsonl.gz"
DEPTHS = 3
DEPTH_WEIGHTS = (1.0, 0.9, 0.8)
TABLE = 8192  # tokens in the draft's vocabulary
HELD_OUT_EVERY = 25
BATCH_TOKENS = 2500
LEARNING_RATE = 3e-3
WARMUP = 8
DECAY = 0.6  # share of the steps, at the end, over which the learning rate falls to zero
_FITTED = 1500  # sequences for the closed-form start
_PASS_TOKENS = 6000
_SORTED = 600  # sequences that are sorted by length together, so that batches need little padding


@dataclass(slots=True)
class Cached:
    """A sequence with the outputs of the frozen model, computed once.

    ids, sampled: [T]. hidden: final-norm output, [T, H] in bfloat16. normaliser: logsumexp of logits, [T].
    """

    ids: Tensor
    sampled: Tensor
    hidden: Tensor
    normaliser: Tensor


@torch.inference_mode()
def compute_states(
    model: Any, samples: Sequence[Sample], fitted: set[int]
) -> tuple[list[Cached], list[States]]:
    """Run the backbone over all sequences; return the training inputs, and the states for the closed form."""
    head = model.get_output_embeddings().weight
    cached: list[Cached | None] = [None] * len(samples)
    states = []
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].ids))

    while order:
        # Right padding does not affect the tokens before it, as attention is causal.
        longest = len(samples[order[min(len(order), 64) - 1]].ids)
        batch, order = order[: max(1, _PASS_TOKENS // longest)], order[max(1, _PASS_TOKENS // longest) :]
        padded = torch.nn.utils.rnn.pad_sequence([samples[index].ids for index in batch], batch_first=True)
        output = model.base_model(padded, output_hidden_states=True, use_cache=False)

        for row, index in enumerate(batch):
            sample, length = samples[index], len(samples[index].ids)
            hidden = output.last_hidden_state[row, :length].clone()
            chunks = [F.linear(part, head).float().logsumexp(-1) for part in hidden.split(512)]
            cached[index] = Cached(sample.ids, sample.sampled, hidden, torch.cat(chunks))
            if index in fitted:
                embedded = model.get_input_embeddings()(sample.ids).float()
                last_input = output.hidden_states[-2][row, :length].float()
                states.append(States(hidden=hidden.float(), embedded=embedded, last_input=last_input))
    return [one for one in cached if one is not None], states


def choose_table(samples: Sequence[Sample], size: int, vocabulary: int) -> Tensor:
    """Return the tokens that the model samples most often, ascending."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for sample in samples:
        counts += torch.bincount(sample.ids[sample.sampled], minlength=vocabulary)
    table = counts.argsort(descending=True, stable=True)[:size].sort().values
    print(f"table of {size} tokens: {counts[table].sum() / counts.sum():.3f} of those sampled")
    return table


class TotalVariation(torch.autograd.Function):
    """Acceptance of drafts, sum_v min(p_v, q_v), with the gradient of total variation.

    d acceptance / d logit_v = q_v (1[q_v < p_v] - sum_u q_u 1[q_u < p_u])
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor) -> Tensor:
        """Return the acceptance of each row; logits: [M, D] of the draft, p: [M, D] of the target."""
        q = logits.float().softmax(-1)
        below = torch.where(q < p, q, 0.0)
        ctx.save_for_backward((below - q * below.sum(-1, keepdim=True)).bfloat16())
        return torch.minimum(p, q).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        (jacobian,) = ctx.saved_tensors
        return jacobian * gradient[:, None].to(jacobian.dtype), None


class Layer:
    """The MTP layer of a Llama, unrolled over the depths of whole batches, with gradients.

    weights: by name without the layer's prefix, float32; products are in bfloat16.
    """

    def __init__(self, model: Any, layer: dict[str, Tensor]) -> None:
        config = model.config
        self.weights = {
            name.removeprefix(MTP_PREFIX): value.float().clone().requires_grad_()
            for name, value in layer.items()
        }
        self._embedding = model.get_input_embeddings().weight.detach()
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self._size, self._eps = config.head_dim, config.rms_norm_eps
        exponents = torch.arange(0, self._size, 2) / self._size
        self._frequencies = config.rope_parameters["rope_theta"] ** -exponents

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self._eps)

    def _product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x.bfloat16(), self.weights[f"{name}.weight"].bfloat16())

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] * self._frequencies
        cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))
        half = self._size // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def _attend(self, x: Tensor, depth: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend to the keys of depth 1 up to each anchor, and to the keys of deeper depths at the anchor."""
        batch, length, _ = x.shape
        positions = torch.arange(length) + depth - 1
        query, key, value = (
            self._product(x, f"self_attn.{name}_proj").float().unflatten(-1, (-1, self._size))
            for name in "qkv"
        )
        keys.append(self._rotate(key, positions))
        values.append(value)
        query = self._rotate(query, positions).unflatten(2, (self._groups, -1)) / math.sqrt(self._size)

        future = torch.full((length, length), float("-inf")).triu(1)
        shallow = torch.einsum("bsngd,btnd->bngst", query.bfloat16(), keys[0].bfloat16()).float() + future
        deeper = [torch.einsum("bsngd,bsnd->bngs", query, key)[..., None] for key in keys[1:]]
        weights = torch.cat((shallow, *deeper), -1).softmax(-1)

        output = torch.einsum(
            "bngst,btnd->bsngd", weights[..., :length].bfloat16(), values[0].bfloat16()
        ).float()
        for index, value in enumerate(values[1:]):
            output = output + torch.einsum("bngs,bsnd->bsngd", weights[..., length + index], value)
        return self._product(output.reshape(batch, length, -1), "self_attn.o_proj").float()

    def _join(self, state: Tensor, tokens: Tensor) -> Tensor:
        """Return the layer's input: states [..., H] joined with the embeddings of the tokens that follow."""
        embedded = self._norm(self._embedding[tokens], "token_layernorm")
        joined = torch.cat((self._norm(state, "hidden_layernorm"), embedded), -1)
        return self._product(joined, "input_proj").float()

    def _finish(self, x: Tensor) -> Tensor:
        """Return the layer's states [..., H] after attention: MLP and last norm."""
        y = self._norm(x, "post_attention_layernorm")
        gated = F.silu(self._product(y, "mlp.gate_proj")) * self._product(y, "mlp.up_proj")
        return self._norm(x + self._product(gated, "mlp.down_proj").float(), "final_layernorm")

    def unroll(self, hidden: Tensor, ids: Tensor) -> list[Tensor]:
        """Return the states of each depth, [B, S, H]; states of anchors near a row's end are meaningless."""
        state, keys, values, states = hidden, [], [], []
        for depth in range(1, DEPTHS + 1):
            x = self._join(state, ids.roll(-depth, 1))
            x = x + self._attend(self._norm(x, "input_layernorm"), depth, keys, values)
            state = self._finish(x)
            states.append(state)
        return states


def depth_acceptances(layer: Layer, batch: Sequence[Cached], rows: Tensor) -> list[Tensor]:
    """Return the acceptance of each depth at the anchors whose drafted token the model sampled.

    Args:
        layer: the draft.
        batch: sequences.
        rows: [D, H], the head's rows for the draft's vocabulary.
    """

    def padded(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(one, name) for one in batch], batch_first=True)

    ids, sampled, hidden, normaliser = map(padded, ("ids", "sampled", "hidden", "normaliser"))
    acceptances = []
    for depth, state in enumerate(layer.unroll(hidden.float(), ids), 1):
        anchors = torch.zeros_like(sampled)
        anchors[:, : -depth - 1] = sampled[:, depth + 1 :]

        with torch.no_grad():
            logits = F.linear(hidden.roll(-depth, 1)[anchors], rows).float()
            p = (logits - normaliser.roll(-depth, 1)[anchors][:, None]).exp()
        acceptances.append(TotalVariation.apply(F.linear(state[anchors].bfloat16(), rows), p))
    return acceptances


class Muon(torch.optim.Optimizer):
    """Steps matrices along their momentum with all singular values made equal (Jordan et al., 2024)."""

    def __init__(self, matrices: Sequence[Tensor], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                update = _orthogonal(matrix.grad.lerp(momentum, 0.95))
                matrix.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(max(matrix.shape)))


def _orthogonal(matrix: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix by five steps of a quintic Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).float()


def batches(lengths: Sequence[int], rng: np.random.Generator) -> list[list[int]]:
    """Return the batches of an epoch: indices of sequences of similar length, in random order."""
    order = rng.permutation(len(lengths)).tolist()
    result: list[list[int]] = []
    for start in range(0, len(order), _SORTED):
        batch: list[int] = []
        for index in sorted(order[start : start + _SORTED], key=lambda index: lengths[index]):
            if batch and (len(batch) + 1) * lengths[index] > BATCH_TOKENS:
                result.append(batch)
                batch = []
            batch.append(index)
        result.append(batch)
    return [result[index] for index in rng.permutation(len(result))]


def train(layer: Layer, data: Sequence[Cached], rows: Tensor, steps: int) -> None:
    """Train the layer, and print the acceptance on held-out sequences from time to time."""
    held_out, training = data[::HELD_OUT_EVERY], [d for i, d in enumerate(data) if i % HELD_OUT_EVERY]
    weights = list(layer.weights.values())
    optimizers = [
        Muon([weight for weight in weights if weight.dim() == 2], LEARNING_RATE),
        torch.optim.AdamW(
            [weight for weight in weights if weight.dim() == 1],
            lr=LEARNING_RATE,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]
    rng, queue, started = np.random.default_rng(1), [], time.monotonic()
    lengths = [len(one.ids) for one in training]

    for step in range(steps + 1):
        if step % 50 == 0 or step == steps:
            figures = " ".join(f"{value:.3f}" for value in measure(layer, held_out, rows))
            print(
                f"step {step}, {time.monotonic() - started:.0f} s: held-out acceptance {figures}", flush=True
            )
        if step == steps:
            return

        queue = queue or batches(lengths, rng)
        acceptances = depth_acceptances(layer, [training[index] for index in queue.pop()], rows)
        terms = [
            weight * (1 - acceptance).mean()
            for weight, acceptance in zip(DEPTH_WEIGHTS, acceptances, strict=True)
        ]

        for optimizer in optimizers:
            optimizer.zero_grad()
            scale = min(1.0, (step + 1) / WARMUP, (1 - step / steps) / DECAY)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * scale
        torch.stack(terms).sum().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()


@torch.no_grad()
def measure(layer: Layer, data: Sequence[Cached], rows: Tensor) -> list[float]:
    """Return the mean acceptance of each depth over sequences."""
    order = sorted(data, key=lambda one: len(one.ids))
    groups = [depth_acceptances(layer, order[start : start + 20], rows) for start in range(0, len(order), 20)]
    return [float(torch.cat(depth).mean()) for depth in zip(*groups, strict=True)]


def main() -> None:
    """Make the layer and the list of its draft vocabulary."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for the two files")
    parser.add_argument("--model", default="smollm2", help="checkpoint, or a fetched model (%(default)s)")
    parser.add_argument("--rollouts", type=Path, metavar="FILE", help=f"its answers ({ROLLOUTS})")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    with quiet():
        path = resolve_model(options.model, "--model")
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    vocabulary = model.config.vocab_size
    samples = read_samples(options.rollouts or shipped(ROLLOUTS), vocabulary)
    samples = [sample for sample in samples if sample.sampled.sum() > DEPTHS]

    started = time.monotonic()
    fitted = np.random.default_rng(0).permutation(len(samples))[:_FITTED].tolist()
    data, states = compute_states(model, samples, set(fitted))
    print(f"hidden states of {len(data)} sequences in {time.monotonic() - started:.0f} s", flush=True)

    table = choose_table(samples, TABLE, vocabulary)
    projection, r2 = fit_input_proj(states, model.config.rms_norm_eps)
    print(f"closed form on {len(states)} sequences: R2 {r2:.3f}")
    layer = Layer(model, start_layer(model, projection, torch.float32))
    train(layer, data, model.get_output_embeddings().weight.detach()[table], options.steps)

    options.out.mkdir(parents=True, exist_ok=True)
    tensors = {
        MTP_PREFIX + name: value.detach().bfloat16().contiguous() for name, value in layer.weights.items()
    }
    save_file(tensors, options.out / "mtp_layer.safetensors", {"format": "pt"})
    (options.out / "draft_vocab.json").write_text(json.dumps({"tokens": table.tolist()}) + "\n")


if __name__ == "__main__":
    main()
