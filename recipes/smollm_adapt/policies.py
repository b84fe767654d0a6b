"""Policies along RL runs of SmolLM2, with their answers, for the studies of drafts during RL.

A run of `recipes.smollm_rl.seeds` keeps only its last checkpoint. The policies between are therefore points
on the straight line from the weights before RL to those after it: part 0 is the released model, part 1 the
end of the run. The studies' inputs from a policy are computed once and stored in a file: its head, its
answers to training prompts (a group for each prompt), to held-out prompts, and to prompts of other kinds.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from recipes.smollm_adapt.objectives import Drafts
from recipes.smollm_adapt.texts import Text, other_answers, read
from recipes.smollm_rl.make_layer import DEPTHS
from recipes.smollm_rl.tasks import TASKS, Data, Task
from rlpipe.config.draft_vocab import read_draft_vocab
from rlpipe.config.paths import resolve_model
from rlpipe.config.spec import SpecConfig
from rlpipe.convert.closed_form import Sample
from rlpipe.convert.gguf import quiet
from rlpipe.convert.samples import sample_model
from rlpipe.models.checkpoint import MTP_PREFIX, read_weights
from rlpipe.rollout.chat import ChatFormat

PROMPTS, GROUP = 2, 4  # training prompts of each task, and answers to each prompt
HELD_OUT = 5  # prompts of each task, once for the results and once for the choice of rates
OTHERS = 20  # prompts of kinds that RL does not train on
TURN = 64  # maximum tokens of an answer, as in `sample_model`
Prompt = tuple[Task, str, Data]


@dataclass(slots=True)
class Policy:
    """The parts of a policy that drafts need.

    head: [V, H] bfloat16, also the embedding. training, held_out, sweep: answers. rewards, prompts: the score
    of each training answer and the number of its prompt. others: answers to prompts of kinds that RL does not
    train on.
    """

    head: Tensor
    training: list[Text]
    rewards: list[float]
    prompts: list[int]
    held_out: list[Text]
    sweep: list[Text]
    others: list[Text]


def measure(drafts: Drafts, policy: Policy) -> dict[str, float]:
    """Measure a draft on held-out answers of a policy; "out of domain" is rejection on the other prompts."""
    others = drafts.measure(policy.others)
    return drafts.measure(policy.held_out) | {"out of domain": others["rejection"]}


def write_between(before: Path, after: Path, part: float, out: Path) -> None:
    """Write the checkpoint at a part of the way from one checkpoint to another; computes in float32."""
    for file in after.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, out)
    first, last = read_weights(before), read_weights(after)
    moved = {
        name: torch.lerp(weight.float(), last[name].float(), part).to(weight.dtype)
        for name, weight in first.items()
    }
    save_file(moved, out / "model.safetensors", {"format": "pt"})


def load_model(path: Path) -> Any:
    """Load a checkpoint with transformers, in bfloat16."""
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def answer(path: Path, prompts: Sequence[Prompt], seed: int) -> list[dict[str, Any]]:
    """Sample an answer of a checkpoint to each prompt.

    Returns the answers that are long enough to draft for: sample, reward, and the number of the prompt.
    """
    chat = ChatFormat.from_pretrained(path)
    texts = [text for _, text, _ in prompts]
    samples = sample_model(path, tokens=TURN * len(texts), seed=seed, prompts=texts)
    answers = []
    for number, ((task, _, data), sample) in enumerate(zip(prompts, samples, strict=True)):
        if sample.sampled.sum() > DEPTHS + 1:
            text = chat.decode(sample.ids[sample.sampled].tolist())
            answers.append({"sample": sample, "reward": task.score(data, text), "number": number})
    return answers


def prompts_of(tasks: Mapping[str, Task], count: int, *, held_out: bool, seed: int) -> list[Prompt]:
    """Return `count` prompts of each task, each with its task and the data that its score needs."""
    return [
        (task, text, data)
        for task in tasks.values()
        for text, data in task.examples(count, held_out=held_out, seed=seed)
    ]


def make_policy(path: Path, number: int) -> Policy:
    """Sample answers of a checkpoint, and its hidden states on them. number: of the training prompts."""
    training = prompts_of(TASKS, PROMPTS, held_out=False, seed=number) * GROUP
    held_out, sweep = (prompts_of(TASKS, HELD_OUT, held_out=True, seed=seed) for seed in (0, 1))
    answers = answer(path, [*training, *held_out, *sweep], seed=0)

    model = load_model(path)
    ends = np.cumsum([len(training), len(held_out)])
    parts: list[list[dict[str, Any]]] = [[], [], []]
    for one in answers:
        parts[np.searchsorted(ends, one["number"], side="right")].append(one)
    texts = [read(model, [one["sample"] for one in part]) for part in parts]
    others = other_answers(path, OTHERS)
    return Policy(
        head=model.get_output_embeddings().weight.detach().clone(),
        training=texts[0],
        rewards=[one["reward"] for one in parts[0]],
        prompts=[one["number"] % (len(training) // GROUP) for one in parts[0]],
        held_out=texts[1],
        sweep=texts[2],
        others=read(model, others),
    )


class Policies:
    """Policies of RL runs, computed unless stored, and the draft that they start with.

    runs: directories of finished runs. folder: of the stored files.
    """

    def __init__(self, runs: list[Path], folder: Path) -> None:
        self.runs, self._folder = runs, folder
        self.before = resolve_model("smollm2")
        self.model = load_model(self.before)
        names = read_weights(self.before).items()
        self.start = {name: weight for name, weight in names if name.startswith(MTP_PREFIX)}
        vocabulary = self.model.config.vocab_size
        table = read_draft_vocab(SpecConfig(draft_vocab="checkpoint"), self.before, vocabulary)
        self.table = torch.tensor(table)

    def get(self, run: int, part: float) -> Policy:
        """Return the policy a part of the way along a run; part 0 is the same for all runs."""
        name = "before" if part == 0 else f"{self.runs[run].name}_{part:.2f}"
        file = self._folder / f"{name}.pt"
        if not file.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory() as temporary:
                checkpoint = self.checkpoint(run, part, Path(temporary))
                policy = make_policy(checkpoint, round(1000 * part) + run)
            torch.save(astuple(policy), file)
            print(f"{name}: {len(policy.training)} answers, reward {sum(policy.rewards):.0f}", flush=True)
        head, training, rewards, prompts, *held_out = torch.load(file)
        sets = [[Text(*one) for one in some] for some in (training, *held_out)]
        return Policy(head, sets[0], rewards, prompts, *sets[1:])

    def checkpoint(self, run: int, part: float, out: Path) -> Path:
        """Write the checkpoint of a policy into a folder and return it; that of part 0 exists already."""
        if part == 0:
            return self.before
        after = sorted((self.runs[run] / "checkpoints").glob("step_*/hf"))[-1]
        write_between(self.before, after, part, out)
        return out

    def reread(self, run: int, part: float) -> list[Text]:
        """Return the training answers of a policy with the hidden states of the run's last policy."""
        file = self._folder / f"{self.runs[run].name}_reads_{part:.2f}.pt"
        if not file.is_file():
            with TemporaryDirectory() as temporary:
                last = load_model(self.checkpoint(run, 1.0, Path(temporary)))
            samples = [Sample(ids=text.ids, sampled=text.sampled) for text in self.get(run, part).training]
            torch.save([astuple(text) for text in read(last, samples)], file)
        return [Text(*one) for one in torch.load(file)]

    def enter(self, policy: Policy) -> None:
        """Give the model the policy's head and embedding, in place, because existing drafts share them."""
        with torch.no_grad():
            self.model.get_input_embeddings().weight.copy_(policy.head)
            self.model.get_output_embeddings().weight.copy_(policy.head)
