"""Compares drafts that are linear in SmolLM2's features: which inputs, which heads, how many texts?

    python -m recipes.smollm_adapt.linear [--out FILE] [--texts 40] [--held-out 16]

A draft predicts the feature that the output head multiplies, as in EAGLE's first version. It is fitted by
ridge regression on the model's own answers, so no optimizer, learning rate or seed matters. Notation:
f_t is the feature after token t, e_t the embedding of token t, and depth k predicts f_{t+k}.

    EAGLE             f_{t+1} from (f_t, e_{t+1}); deeper depths from its own prediction and the next token
    unshifted         f_{t+1} from (f_t, e_t); the sampled token is not known
    feature only      f_{t+1} from f_t; deeper depths from its own prediction
    token only        f_{t+1} from e_{t+1}
    parallel heads    f_{t+k} from f_t, one map per depth (Medusa, Gloeckle)
    Hydra heads       f_{t+k} from (f_t, e_{t+1} .. e_{t+k}), one map per depth
    three layers      EAGLE at depth 1 from features after a third, two thirds and all of the layers

Hidden states of the frozen model are computed once and stored. Measured on held-out answers at temperature 1:
the exact acceptance sum_v min(p, q) of each depth, and accepted drafts of a window of three, exact in
expectation over the target's tokens. Tokens outside the draft's vocabulary of frequent tokens count as
rejected. The unit of every interval is the held-out text (Student's, 95%, paired).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes import theory
from recipes.runs import rounded_over_seeds
from recipes.smollm_adapt.texts import shipped_answers
from recipes.smollm_rl.make_layer import choose_table
from rlpipe.config.paths import resolve_model
from rlpipe.convert.gguf import quiet

DEPTHS = 3
RIDGES = (0.01, 0.1, 1.0)  # times the number of rows; inputs have mean square near 1
LONGEST = 72  # tokens of a text
SIZES = (5, 10, 20, 40)  # texts to fit on


@dataclass(slots=True)
class Text:
    """An answer of T tokens. ids: [T]. sampled: [T] bool. layers: [3, T, H], last is f. embedded: [T, H]."""

    ids: Tensor
    sampled: Tensor
    layers: Tensor
    embedded: Tensor

    @property
    def anchors(self) -> Tensor:
        """Return the positions t for which tokens t + 1 .. t + DEPTHS + 1 are sampled."""
        after = [self.sampled.roll(-k) for k in range(1, DEPTHS + 2)]
        known = torch.arange(len(self.ids)) < len(self.ids) - DEPTHS - 1
        return (torch.stack(after).all(0) & known).nonzero().flatten()


@torch.inference_mode()
def read(model: Any, samples: Sequence[Any]) -> list[Text]:
    """Run the frozen model over answers, one at a time."""
    found, table = [], model.get_input_embeddings()
    for sample in samples:
        ids = sample.ids[:LONGEST]
        output = model.base_model(ids[None], output_hidden_states=True, use_cache=False)
        states, count = output.hidden_states, len(output.hidden_states) - 1
        layers = [states[count // 3][0], states[2 * count // 3][0], output.last_hidden_state[0]]
        one = Text(ids, sample.sampled[:LONGEST], torch.stack(layers).float(), table(ids).float())
        found.append(Text(one.ids, one.sampled, one.layers.clone(), one.embedded.clone()))
    return found


def normed(x: Tensor) -> Tensor:
    """Scale rows to mean square 1 and append a constant."""
    return F.pad(F.rms_norm(x, x.shape[-1:]), (0, 1), value=1.0)


def fit(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Solve for the least-squares map [inputs, outputs], in float64.

    The ridge is chosen from RIDGES: fitted to the first three quarters of the rows, best on the last quarter.
    """
    x, y = inputs.double(), outputs.double()
    cut = 3 * len(x) // 4

    def error(ridge: float) -> float:
        return (x[cut:] @ _solve(x[:cut], y[:cut], ridge) - y[cut:]).square().sum().item()

    return _solve(x, y, min(RIDGES, key=error)).float()


def _solve(x: Tensor, y: Tensor, ridge: float) -> Tensor:
    gram = x.T @ x
    gram.diagonal().add_(ridge * len(x))
    return torch.linalg.solve(gram, x.T @ y)


def rows(texts: Sequence[Text], part: str, shift: int) -> Tensor:
    """Return features (`f`), embeddings (`e`) or all layers (`all`) at t + shift of all anchors t, normed."""
    values = {
        "f": lambda text: text.layers[-1],
        "e": lambda text: text.embedded,
        "all": lambda text: torch.cat([F.rms_norm(x, x.shape[-1:]) for x in text.layers], -1),
    }[part]
    return torch.cat([normed(values(text)[text.anchors + shift]) for text in texts])


def targets(texts: Sequence[Text], depth: int) -> Tensor:
    """Return f_{t+depth} for all anchors t, [N, H]."""
    return torch.cat([text.layers[-1][text.anchors + depth] for text in texts])


def one_map(
    inputs: Sequence[tuple[str, int]], depth: int, train: Sequence[Text], test: Sequence[Text]
) -> Tensor:
    """Fit f_{t+depth} to some inputs, each (part, shift), and predict it for held-out anchors."""
    x, y = (torch.cat([rows(texts, *one) for one in inputs], -1) for texts in (train, test))
    return y @ fit(x, targets(train, depth))


def chain(token: int | None, train: Sequence[Text], test: Sequence[Text]) -> list[Tensor]:
    """Predict depth k from the previous prediction and the token at t + k - 1 + token; None for no token."""
    at = [] if token is None else [("e", token)]
    x = torch.cat([rows(train, *one) for one in [("f", 0), *at]], -1)
    weight, state, found = fit(x, targets(train, 1)), None, []
    for depth in range(DEPTHS):
        feature = rows(test, "f", 0) if state is None else normed(state)
        tokens = [rows(test, part, shift + depth) for part, shift in at]
        state = torch.cat([feature, *tokens], -1) @ weight
        found.append(state)
    return found


def arms(train: Sequence[Text], test: Sequence[Text]) -> dict[str, list[Tensor]]:
    """Return the predictions of every draft: by depth, [N, H] each."""
    depths = range(1, DEPTHS + 1)
    return {
        "EAGLE": chain(1, train, test),
        "unshifted": chain(0, train, test),
        "feature only": chain(None, train, test),
        "token only": [one_map([("e", k)], k, train, test) for k in depths],
        "parallel heads": [one_map([("f", 0)], k, train, test) for k in depths],
        "Hydra heads": [
            one_map([("f", 0), *(("e", j) for j in range(1, k + 1))], k, train, test) for k in depths
        ],
        "three layers": [one_map([("all", 0), ("e", 1)], 1, train, test)],
    }


class HeldOut:
    """The outputs of the target at the anchors of held-out texts, computed once for all drafts.

    p: by depth, [N, D], probabilities of the tokens in the draft's vocabulary. p_x: [N, K] log-probabilities
    of the realised tokens. index: [N, K] indices of the realised tokens in the draft's vocabulary, else D.
    """

    def __init__(self, texts: Sequence[Text], head: Tensor, table: Tensor) -> None:
        self.rows = head[table]
        self.sizes = [len(text.anchors) for text in texts]
        known = torch.full((len(head),), len(table))
        known[table] = torch.arange(len(table))
        self.p, p_x, index = [], [], []
        for depth in range(1, DEPTHS + 1):
            log_p = (targets(texts, depth) @ head.T).log_softmax(-1)
            tokens = torch.cat([text.ids[text.anchors + depth + 1] for text in texts])
            self.p.append(log_p[:, table].exp())
            p_x.append(log_p.gather(-1, tokens[:, None])[:, 0])
            index.append(known[tokens])
        self.p_x, self.index = torch.stack(p_x, -1), torch.stack(index, -1)

    def measure(self, states: Sequence[Tensor]) -> dict[str, list[float]]:
        """Return alpha_k of each depth and accepted drafts of a window, as means over each text's anchors."""
        alphas, q_x = [], []
        for depth, state in enumerate(states):
            log_q = (state @ self.rows.T).log_softmax(-1)
            alphas.append(torch.minimum(self.p[depth], log_q.exp()).sum(-1))
            padded = F.pad(log_q, (0, 1), value=-torch.inf)
            q_x.append(padded.gather(-1, self.index[:, depth, None])[:, 0])
        found = {f"depth {k}": alpha for k, alpha in enumerate(alphas, 1)}
        if len(states) == DEPTHS:
            reach = theory.chain_reach_target(self.p_x, torch.stack(q_x, -1), torch.stack(alphas, -1))
            found["accepted of 3"] = reach.sum(-1)
        return {name: [x.mean().item() for x in value.split(self.sizes)] for name, value in found.items()}


def compare(found: Mapping[str, Mapping[str, Sequence[float]]], against: str) -> dict[str, Any]:
    """Return means over texts, and paired differences from a baseline row, with intervals."""
    table: dict[str, Any] = {}
    for name, row in found.items():
        table[name] = {key: rounded_over_seeds(values) for key, values in row.items()}
        for key, values in row.items():
            if name != against and key in found[against]:
                gaps = [a - b for a, b in zip(values, found[against][key], strict=True)]
                table[name][f"{key}, minus {against}"] = rounded_over_seeds(gaps)
    return table


def load(args: argparse.Namespace) -> tuple[list[Text], list[Text], Tensor, Tensor]:
    """Return the texts to fit, the held-out texts, the head and the draft's vocabulary; computed once."""
    if not args.states.is_file():
        from transformers import AutoModelForCausalLM

        with quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(
                resolve_model("smollm2"), dtype=torch.float32
            ).eval()
        training, held_out = shipped_answers(model.config.vocab_size)
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0))[: args.texts]
        parts = [[training[i] for i in order.tolist()], held_out[: args.held_out]]
        texts = [[astuple(t) for t in read(model, part) if len(t.anchors)] for part in parts]
        head = model.get_output_embeddings().weight.detach().clone()
        args.states.parent.mkdir(parents=True, exist_ok=True)
        torch.save((*texts, head, choose_table(training, args.table, model.config.vocab_size)), args.states)
    train, test, head, table = torch.load(args.states)
    return [Text(*t) for t in train], [Text(*t) for t in test], head, table


def main() -> None:
    """Fit, measure, write the results, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--states", type=Path, default=Path("runs/smollm_linear.pt"), help="kept here")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--table", type=int, default=4096, help="tokens of the draft")
    args = parser.parse_args()
    torch.set_num_threads(1)

    train, test, head, table = load(args)
    held_out = HeldOut(test, head, table)
    drafts = {name: held_out.measure(states) for name, states in arms(train, test).items()}
    counts = [count for count in SIZES if count <= len(train)]
    sizes = {str(count): held_out.measure(chain(1, train[:count], test)) for count in counts}
    results = {
        "texts": len(train),
        "held out": len(test),
        "anchors": [sum(len(t.anchors) for t in part) for part in (train, test)],
        "drafts": compare(drafts, "EAGLE"),
        "by texts": compare(sizes, str(SIZES[0])),
    }
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
