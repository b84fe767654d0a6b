"""One GRPO run of TRL on the tasks of smollm_rl, for `against_trl.py`. Runs in TRL's own environment.

It imports TRL, transformers and, from this project, only the tasks, which need only the standard library.
Held-out answers are sampled with transformers' `generate` at temperature 1 and scored as in training; a
step's time excludes this.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.smollm_rl.tasks import TASKS, Data

Message = dict[str, str]
# Type of the stored weights, and whether products are computed in bfloat16 from float32 weights (autocast).
PRECISIONS = {
    "bf16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
    "fp32": (torch.float32, False),
}


def reward(completions: list[list[Message]], task: list[str], data: list[Data], **_: Any) -> list[float]:
    """Score completions as the suite does."""
    answers = [completion[-1]["content"] for completion in completions]
    return [TASKS[name].score(d, answer) for name, d, answer in zip(task, data, answers, strict=True)]


class Recorder(TrainerCallback):
    """Times the steps, and measures the held-out reward before the first step, at intervals, and at the end.

    steps: one record per step. held_out: one record per measurement, with steps and training seconds so far.
    """

    def __init__(self, settings: argparse.Namespace, tokenizer: Any) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self.steps: list[dict[str, float]] = []
        self.held_out: list[dict[str, Any]] = []
        self._started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **models: Any) -> None:
        """Measure the model as it is."""
        self._validate(models["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **models: Any) -> None:
        """Stop the clock, and measure if a measurement is due."""
        self.steps.append({"seconds": time.monotonic() - self._started})
        done, every = len(self.steps), self._settings.val_every
        if done % every == 0 or done == self._settings.steps:
            self._validate(models["model"])

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Add TRL's reward, length and entropy to the record of the step."""
        names = {"reward": "reward", "completions/mean_length": "response_tokens", "entropy": "entropy"}
        if self.steps and logs is not None:
            self.steps[-1] |= {names[name]: logs[name] for name in names.keys() & logs.keys()}

    @torch.inference_mode()
    def _validate(self, model: Any) -> None:
        settings, tokenizer = self._settings, self._tokenizer
        rewards: dict[str, float] = {}
        training = model.training
        model.eval()

        for name, task in TASKS.items():
            examples = task.examples(settings.held_out, held_out=True)[: settings.val_instances]
            prompts = [[{"role": "user", "content": prompt}] for prompt, _ in examples]
            inputs = tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            tokens = model.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=settings.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
            answers = tokenizer.batch_decode(
                tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            scores = [task.score(data, answer) for (_, data), answer in zip(examples, answers, strict=True)]
            rewards[name] = sum(scores) / len(scores)

        model.train(training)
        seconds = sum(step["seconds"] for step in self.steps)
        self.held_out.append({"step": len(self.steps), "training_seconds": seconds, "reward": rewards})


def run(settings: argparse.Namespace) -> dict[str, Any]:
    """Train, and return what the recorder saw."""
    torch.set_num_threads(settings.threads)
    set_seed(settings.seed)
    dtype, autocast = PRECISIONS[settings.precision]
    tokenizer = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)

    # The same order as the suite: tasks take turns.
    examples = [
        [
            {"prompt": [{"role": "user", "content": prompt}], "task": name, "data": data}
            for prompt, data in task.examples(settings.train)
        ]
        for name, task in TASKS.items()
    ]
    rows = [row for turn in zip(*examples, strict=True) for row in turn]

    recorder = Recorder(settings, tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            callbacks=[recorder],
            args=GRPOConfig(
                output_dir=directory,
                seed=settings.seed,
                per_device_train_batch_size=settings.prompts * settings.group,
                num_generations=settings.group,
                max_completion_length=settings.max_new_tokens,
                temperature=1.0,
                max_steps=settings.steps,
                learning_rate=settings.lr,
                lr_scheduler_type="constant_with_warmup",
                warmup_steps=settings.warmup_steps,
                adam_beta2=settings.beta2,
                beta=0.0,
                use_cpu=True,
                bf16=autocast,
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
        )
        trainer.train()
    return {"steps": recorder.steps, "held_out": recorder.held_out}


def main() -> None:
    """Write the run's records as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    counts = "seed steps val-every val-instances held-out train prompts group max-new-tokens warmup-steps"
    for name in (*counts.split(), "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("lr", "beta2"):
        parser.add_argument(f"--{name}", type=float, required=True)
    settings = parser.parse_args()
    settings.out.write_text(json.dumps(run(settings)))


if __name__ == "__main__":
    main()
