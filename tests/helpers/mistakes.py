"""Mistakes of a user, each with what its message must say: one table for the test and for the benchmark.

A row of `SETTINGS` is `overrides | remedy`, behind `+recipe=swe_rl`; its message must hold the name and the
value of the last override, and the remedy. Where the message words them otherwise they follow as `| what |
value`. `FILES` and `ENVIRONMENTS` prepare files first. Whoever plays them hides GPUs (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True, kw_only=True, frozen=True)
class Mistake:
    """given: of `rlpipe run`. what, value, remedy: parts of its message. files: prepares the folder."""

    name: str
    given: list[str]
    what: str
    value: str
    remedy: str
    files: Callable[[Path], object] = lambda folder: None
    status: int = 2

    def lacks(self, message: str) -> list[str]:
        """Which of what, value and remedy a message does not say."""
        return [part for part in ("what", "value", "remedy") if getattr(self, part) not in message]


SETTINGS = r"""
spec.gama=2 | spec.gamma
+spec.gama=2 | spec.gamma | spec.gama
++rollout.sglang.prt=3 | rollout.sglang.port | rollout.sglang.prt
steps=3 | run.steps
run.step=3 | run.steps
rollout.temprature=1 | rollout.temperature
algo.kl_coeff=0.1 | algo.kl_coef
pipeline.groupsize=4 | pipeline.group_size
val.evry=5 | val.every
metrics.wand=off | metrics.wandb
env.max_turn=3 | env.max_turns
cluster.adress=x | cluster.address
spec.Gamma=2 | spec.gamma
trainer.learning_rate=1e-4 | --cfg job
~spec | leave it out | ~spec | spec
recipe=agent_rl | use +recipe=agent_rl
+recipe=agent_rl | Keep one | chosen twice
rollout=sglan | sglang
env=math | Choose one of
cluster=one_nod | one_node
--run.steps=3 | Did you mean run.steps=3 | no dashes
--steps=3 | Did you mean run.steps=3 | no dashes
-steps | Remove it | no such option | -steps
run.steps | key=value | neither a setting | run.steps
run.steps==3 | key=value | cannot be read | run.steps==3
'run.steps=[1' | a list as [a,b] | cannot be read | run.steps=[1
'run.steps = 3' | key=value | cannot be read | run.steps = 3
--multirun --cfg job | Leave one | --multirun | --cfg
--config-dir /nowhere | name the one | --config-dir
--config-name nope | Leave the option out | --config-name
--config-name recipe/swe_rl | give +recipe=swe_rl | --config-name
--config-name folder/x | choose +recipe=NAME | --config-name
trainer.lr=1e-4,3e-4 | add --multirun
'run.steps=${nope}' | a whole number | run.steps | nope
spec=3 | spec.mode=VALUE
model=foo | model.path=VALUE
run.steps=many | a whole number
run.steps=1.5 | a whole number
run.steps=null | a whole number
run.seed=abc | a whole number
val.every=often | a whole number
trainer.lr=fast | a number
spec.adaptive=maybe | true or false
metrics.report=perhaps | true or false
spec.tree=[a] | a list in brackets
env.held_out_files=null | a list in brackets
env.options=3 | env.options={}
+env.sandbox=3 | env.sandbox.backend
spec.mode=rejecton | Did you mean rejection?
spec.drafter=mpt | Did you mean mtp?
algo.correction=tis | tis_token
pipeline.stale=dropp | Did you mean drop?
rollout.engine=sglan | Did you mean sglang?
rollout.dtype=fp16 | bfloat16
trainer.precision=fp16 | bf16
trainer.lr_schedule=cos | Did you mean cosine?
env.name=swee | Did you mean swe?
run.resume=yes | anyway
metrics.wandb=on | offline
cluster.mode=local | inline
run.half=left | rollout
task=sft | mtp_adapt
env.sandbox.backend=podman | docker
env.tools.parser=xml | hermes
algo.loss_agg=mean | token-mean
algo.kl_kind=k4 | k3
draft.train=yes | draft.train=online
run.steps=0 | at least 1
run.max_masked_share=2 | a share from 0 to 1
run.save_every=-1 | at least 0
val.samples=0 | at least 1
spec.gamma=0 | spec.mode=none
spec.gamma=500 | lower it
spec.mode=tree spec.tree=[] | one or more children
pipeline.prompts_per_step=0 | at least 1
pipeline.group_size=1 | at least 2
pipeline.max_staleness=-1 | 0 is synchronous
pipeline.oversample=2 | set pipeline.stale=drop
rollout.workers=0 | at least 1
rollout.max_context=1 | at least 2
rollout.temperature=-1 | 1.0 samples
rollout.temperature=0 | set rollout.temperature=1.0
rollout.top_p=0.9 | Lower rollout.temperature
rollout.top_k=5 | Lower rollout.temperature
mtp.train=online | write draft.train=online
rollout.sglang.canary_retries=3 | Leave it out
rollout.device=gpu | set auto, cpu, cuda
rollout.device=cuda | set rollout.device=cpu
cluster=one_node | set rollout.device=cpu | rollout.device | cuda
trainer.tp=0 | at least 1
trainer.tp=3 | Set trainer.tp to one of
trainer.sp=true | raise trainer.tp
trainer.tp=2 trainer.sp=true trainer.layers=te | set trainer.layers=local
trainer.tp=2 trainer.sp=true draft.train=online draft.objective=ppow | Set trainer.sp=false
trainer.pp=99 | Set trainer.pp to at most
trainer.pp=2 draft.train=online draft.objective=ppow | Set trainer.pp=1
trainer.cp=0 | at least 1
trainer.cp=2 trainer.layers=te | set trainer.layers=local
trainer.cp=2 draft.train=online draft.objective=ppow | Set trainer.cp=1
trainer.ep=2 | Set trainer.ep to one of [1]
trainer.dp=2 trainer.ep=2 | to 1 for a model without
trainer.lora.rank=-1 | 0 trains all weights
trainer.lora.rank=5000 | set a smaller trainer.lora.rank
trainer.lora.alpha=0 | twice the rank is usual
trainer.lora.targets=mpl | Did you mean mlp?
trainer.lora.rank=8 trainer.layers=te | Set trainer.layers=local
trainer.min_lr=1 | must lie in
trainer.beta1=1 | must be in [0, 1)
trainer.clip_grad=-1 | at least 0
trainer.micro_batch_tokens=100 | raise it
rollout.max_context=100000 | lower it
rollout.max_new_tokens=5000 | raise the context
algo.clip_low=0 | must be positive
algo.clip_dual=1 | 3.0 is usual
algo.kl_coef=-1 | 0 keeps no reference
algo.loss_agg=seq-mean-token-sum-norm | set it, for example
algo.correction=user | algo.user_correction=my_code.py:NAME
algo.user_correction=m:f | algo.correction=user
algo.correction=icepop algo.correction_low=3 | swap them
algo.proximal=rollout | set algo.correction=none
algo.mask_high=2 | choose a rule
algo.mask=seq_mean_k3 | needs algo.mask_high > 0
algo.mask=token_k1 algo.mask_high=2 algo.mask_low=3 | choose it from 0
pipeline.filter_equal_rewards=true algo.credit=turn | set pipeline.filter_equal_rewards=false
algo.obrs.lam=0 | 1.0 is usual
algo.advantage=grppo | Use one of
algo.policy_loss=vanila | Use one of
pipeline.stale=keep algo.correction=none | set algo.correction
run.half=train | set run.dump=FOLDER
task=mtp_adapt draft.objective=e2e_chain adapt.data=x.jsonl | the model's own rollouts
task=mtp_adapt draft.anchors=visit adapt.context_weight=0.3 | draft.anchors=uniform
task=mtp_adapt draft.interval=2 | Set draft.interval=1
spec.mode=greedy | set both to 0
spec.mode=none draft.train=online | draft.train=off
spec.mode=none spec.adaptive=true | use spec.mode=rejection
spec.mode=tree spec.drafter=suffix | use target_only
spec.draft_path=/x | Set both or neither
spec.drafter=eagle3 | which needs one
metrics.prometheus_port=70000 | Set 1..65535
metrics.wandb_project= | Name a W&B project | metrics.wandb_project | empty
metrics.rollouts_per_step=-1 | 0 writes none
metrics.wandb=online | run `wandb login`
cluster.share_gpus=true trainer.dp=2 | make them equal | cluster.share_gpus | 2
cluster=inline trainer.dp=2 | use cluster=ray | trainer.dp
cluster=inline rollout.workers=3 | use cluster=ray
cluster.address=127.0.0.1:1 | ray start --head
cluster.address=nowhere | give HOST:6379
cluster.address=ray://127.0.0.1:1 | ray start --head
env.sandbox.timeout_s=0 | without this limit
env.max_turns=0 | must be positive
env.threads=0 | must be positive
env.test_command=pytest | must contain {runner}
env.held_out_files=[] | give at least one | env.held_out_files | no file
env.held_out_files=[a/x.jsonl,b/x.jsonl] | rename the files | env.held_out_files | b/x.jsonl
env.name=user | env.suite=my_env.py:NAME
env=reasoning env.reasoning.tasks=[] | name at least one | env.reasoning.tasks | empty
env=tools env.tools.names=[] | name at least one
env=tools env.tools.max_calls=0 | at least 1
env=tools env.tools.families=[sums] | one or more of | env.tools.families | sums
env.train_file=/no/such.jsonl | Give a JSONL file
env.suite=nothing:make | put that on PYTHONPATH
algo.correction=user algo.user_correction=nothing:f | put that on PYTHONPATH
env.suite=json | module:function or path/to/file.py:function
env.suite=a:b:c | module:function or path/to/file.py:function
env.suite=my_env.py | as in my_env.py:NAME
env.suite=no/such.py:make | folder in which the run is started
env.suite=json:dumpz | Did you mean dump
env.suite=math:pi | function(config, seed)
rollout=sglang spec.mode=tree | rollout=embedded
rollout=sglang spec.drafter=suffix | rollout=embedded
decoupled.path=/no/model | Point decoupled.path
model.path=/no/model | Point model.path
model.chat_template=none.jinja | a relative path starts at
model.path=Qwen/Qwen2.5-0.5B | hf download Qwen/Qwen2.5-0.5B
model.path=Qwen/Qwen2.5-0.5B@main | set HF_ENDPOINT to a mirror
run.dir=/dev/null/x | set run.dir
rollout.max_running=100000000 | Lower it
pipeline.group_size=100000000 | Lower it
pipeline.prompts_per_step=1000000000 | Lower it
pipeline.max_staleness=100000000 | Lower it
val.samples=2000000000 | Lower it
val.instances=1000000 | set 0
"""


def checkpoint(edit: Callable[[Path], object]) -> Callable[[Path], None]:
    """Prepares `model`, the shipped checkpoint, edited."""

    def prepare(folder: Path) -> None:
        shutil.copytree(ROOT / "models" / "tiny", folder / "model")
        edit(folder / "model")

    return prepare


def config(**changes: object) -> Callable[[Path], None]:
    """The shipped checkpoint with other values in its config.json; None removes one."""

    def edit(model: Path) -> None:
        file = model / "config.json"
        changed = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))

    return checkpoint(edit)


def text(name: str, content: str) -> Callable[[Path], None]:
    """The shipped checkpoint with other text in one of its files."""
    return checkpoint(lambda model: (model / name).write_text(content))


def cut(model: Path) -> None:
    """Half of the weights' file, as a download that was interrupted leaves it."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def large_token(model: Path) -> None:
    """A token of the tokenizer beyond the model's vocabulary."""
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["beyond"] = 5000
    file.write_text(json.dumps(tokenizer))


def stored_as(dtype: str) -> Callable[[Path], None]:
    """The shipped checkpoint with its first weight declared to be of another type of four bytes."""

    def edit(model: Path) -> None:
        file = model / "model.safetensors"
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(content[:end].replace(b'"F32"', f'"{dtype}"'.encode(), 1) + content[end:])

    return checkpoint(edit)


def diverged(model: Path) -> None:
    """The shipped checkpoint with a NaN as its last number."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\xc0\x7f")


def renamed(*parts: str) -> Callable[[Path], None]:
    """The shipped checkpoint in a folder of `model`, as a run directory holds it."""

    def prepare(folder: Path) -> None:
        for part in parts:
            shutil.copytree(ROOT / "models" / "tiny", folder / "model" / part)

    return prepare


def adapter(folder: Path) -> None:
    """A folder that peft wrote."""
    (folder / "model").mkdir()
    (folder / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (folder / "model" / "adapter_model.safetensors").write_text("weights")


def quantised(folder: Path) -> None:
    """A folder of llama.cpp's."""
    (folder / "model").mkdir()
    (folder / "model" / "model-Q4.gguf").write_bytes(b"GGUF")


AGAIN = "from the checkpoint that the model comes from"
INDEX = '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
# name, files, what, value, remedy
FILES = [
    (
        "config.json is no JSON",
        text("config.json", "{\n  model_type: 3}"),
        "config.json:2",
        "column 3",
        AGAIN,
    ),
    ("config.json is a list", text("config.json", "[]"), "config.json", "a list", AGAIN),
    ("config.json without a size", config(hidden_size=None), "hidden_size", "None", AGAIN),
    ("config.json with a size of 0", config(vocab_size=0), "vocab_size", "0", AGAIN),
    ("config.json with a size in words", config(num_hidden_layers="8"), "num_hidden_layers", "'8'", AGAIN),
    ("gpt2", config(model_type="gpt2"), "model_type", "'gpt2'", "one of these families"),
    ("an MoE type", config(model_type="qwen2_moe"), "model_type", "'qwen2_moe'", "one of these families"),
    ("another activation", config(hidden_act="gelu"), "hidden_act", "'gelu'", "use a checkpoint without it"),
    ("sliding window", config(use_sliding_window=True), "sliding-window", "attention", "use a checkpoint"),
    ("a rope scaling", config(rope_parameters={"rope_type": "longrope"}), "scaling", "'longrope'", "one of"),
    ("biases", config(mlp_bias=True), "mlp_bias", "true", "mlp_bias=false"),
    (
        "no MTP layer",
        config(num_nextn_predict_layers=None),
        "num_nextn_predict_layers",
        "0",
        "spec.mode=none",
    ),
    ("a wrong hidden size", config(intermediate_size=256), "wrong shape", "256", "download"),
    ("a layer too many", config(num_hidden_layers=9), "missing", "model.layers.8", "download"),
    ("a layer too few", config(num_hidden_layers=7), "unknown", "model.layers.7", "download"),
    ("truncated safetensors", checkpoint(cut), "model.safetensors", "bytes", "Download it again"),
    (
        "weights that are text",
        text("model.safetensors", "Not found"),
        "model.safetensors",
        "9 bytes",
        "again",
    ),
    (
        "no safetensors",
        checkpoint(lambda m: (m / "model.safetensors").unlink()),
        "no *.safet",
        "model",
        "point",
    ),
    ("a shard is not there", text("model.safetensors.index.json", INDEX), "index.json", "00001", "Download"),
    ("integer weights", stored_as("I32"), "model.safetensors", "stored as I32", "Take the checkpoint"),
    ("a NaN in the weights", checkpoint(diverged), "model.safetensors", "1 of the", "are NaN"),
    ("a PEFT adapter", adapter, "is a PEFT adapter of 'org/base'", "model", "merge_and_unload()"),
    ("a GGUF file", quantised, "llama.cpp's format", "model", "rlpipe fetch"),
    (
        "a run directory",
        renamed("checkpoints/step_2/hf", "checkpoints/step_10/hf"),
        "is of a run",
        "model",
        "step_10/hf?",
    ),
    ("a checkpoint of a run", renamed("hf"), "is a checkpoint of a run", "model", "/model/hf?"),
    ("no tokenizer", checkpoint(lambda m: (m / "tokenizer.json").unlink()), "no tokenizer", "model", "Copy"),
    ("tokenizer is no JSON", text("tokenizer.json", "<html>"), "tokenizer.json:1", "column 1", AGAIN),
    ("tokenizer is none", text("tokenizer.json", "{}"), "tokenizer.json", "not a tokenizer", AGAIN),
    (
        "tokenizer_config is no JSON",
        text("tokenizer_config.json", "{"),
        "tokenizer_config.json:1",
        "col",
        AGAIN,
    ),
    ("tokenizer beyond the vocabulary", checkpoint(large_token), "vocab_size=800", "5000", "trained with"),
    (
        "stop token beyond",
        text("generation_config.json", '{"eos_token_id": 900}'),
        "eos_token_id",
        "900",
        "use",
    ),
    ("no template", checkpoint(lambda m: (m / "chat_template.jinja").unlink()), "no chat", "model", "add"),
    (
        "template unclosed",
        text("chat_template.jinja", "a\n{% for m in %}"),
        "jinja:2",
        "TemplateSynt",
        "Correct",
    ),
    ("template of a typo", text("chat_template.jinja", "{{ message.x }}"), "jinja:1", "'message'", "Correct"),
    (
        "template without turns",
        text("chat_template.jinja", "hello"),
        "chat_template.jinja",
        "user",
        "correct",
    ),
]

RECIPES = [  # content of recipe/own.yaml, what, value, remedy
    ("bad indentation", "run:\n    steps: 3\n   seed: 2\n", "own.yaml:3", "column 4", "indentation"),
    ("an open bracket", "run: {steps: 3\n", "own.yaml:2", "column 1", "brackets"),
    ("no package line", "recipe: own\nrun: {steps: 3}\n", "own.yaml", "recipe", "# @package _global_"),
    ("a typo", "# @package _global_\nrecipe: own\nrun: {stepz: 3}\n", "own.yaml", "run.stepz", "run.steps"),
    ("a word", "# @package _global_\nrecipe: own\nrun: {steps: many}\n", "run.steps", "many", "whole number"),
    (
        "no such choice",
        "# @package _global_\nspec: {mode: blok}\n",
        "spec.mode",
        "'blok'",
        "Did you mean block?",
    ),
]

ENVIRONMENT = """
import numpy, torch
from rlpipe.envs.base import StepResult

class Episode:
    def messages(self):
        return [{"role": "user", "content": "a question"}]
    def step(self, action):
        return StepResult(done=True, reward=1.0, info={})
    def finish(self):
        return StepResult(done=True, reward=0.0)
    def close(self): pass

class Suite:
    max_turns = 1
    def splits(self): return ["held_out"]
    def instance_ids(self, split): return [split + str(n) for n in range(9)]
    def episode(self, instance_id): return Episode()
    def sandbox_counts(self): return 0, 0

def make_suite(config, seed):
    return Suite()
"""
REWARD, STEP = "reward=1.0", "StepResult(done=True, reward=1.0, info={})"
OPENING, NUMBER = '[{"role": "user", "content": "a question"}]', "give a finite number"
# name, what stands there, what is written instead, what, value, remedy
ENVIRONMENTS = [
    ("a reward of NaN", REWARD, "reward=float('nan')", "my_env.py:9", "reward=nan", NUMBER),
    ("an infinite reward", REWARD, "reward=-float('inf')", "my_env.py:9", "reward=-inf", NUMBER),
    ("a NaN of numpy", REWARD, "reward=numpy.float32('nan')", "my_env.py:9", "nan", NUMBER),
    ("a NaN of torch", REWARD, "reward=torch.tensor(float('nan'))", "my_env.py:9", "nan", NUMBER),
    ("no reward", REWARD, "reward=None", "my_env.py:9", "reward=None", NUMBER),
    ("a reward in words", REWARD, "reward='good'", "my_env.py:9", "reward='good'", NUMBER),
    ("an array as reward", REWARD, "reward=numpy.ones(2)", "my_env.py:9", "(ndarray)", NUMBER),
    ("a list as reward", REWARD, "reward=[1.0]", "my_env.py:9", "reward=[1.0]", NUMBER),
    ("a complex reward", REWARD, "reward=1j", "my_env.py:9", "reward=1j", NUMBER),
    ("a bare NaN", STEP, "float('nan')", "my_env.py:9", "reward=nan", NUMBER),
    ("no return", STEP, "None", "my_env.py:9", "None (NoneType)", "or StepResult("),
    ("a tuple of Gymnasium's", STEP, "'seen', 1.0, True, {}", "my_env.py:9", "(tuple)", "or StepResult("),
    (
        "a role of no template",
        OPENING,
        OPENING.replace("user", "human"),
        "my_env.py:7",
        "'human'",
        "use one of",
    ),
    (
        "an assistant's message last",
        OPENING,
        OPENING.replace("user", "assistant"),
        "my_env.py:7",
        "'assistant'",
        "end with another role",
    ),
    (
        "a prompt beyond the context",
        '"a question"',
        '"a question" * 9999',
        "env.suite",
        "rollout.max_context=",
        "shorten the prompts",
    ),
    (
        "an alarm in step()",
        STEP,
        "__import__('signal').signal(14, print)",
        "my_env.py:9",
        "main thread",
        "Correct it",
    ),
    (
        "no observation",
        STEP,
        "StepResult(observation=None)",
        "my_env.py:9",
        "observation=None",
        "give a string",
    ),
    ("bytes", STEP, "StepResult(observation=b'seen')", "my_env.py:9", "b'seen' (bytes)", "give a string"),
    (
        "half a surrogate",
        STEP,
        r"StepResult(observation='\ud800')",
        "my_env.py:9",
        "'\\ud800'",
        "errors='replace'",
    ),
    (
        "done in words",
        STEP,
        "StepResult(done='yes', reward=1.0)",
        "my_env.py:9",
        "done='yes'",
        "True or False",
    ),
    (
        "an object in info",
        "info={}",
        "info={'lock': object()}",
        "my_env.py:9",
        "info['lock']",
        "JSON can hold",
    ),
    ("a NaN in info", "info={}", "info={'loss': float('nan')}", "my_env.py:9", "info['loss']=nan", "finite"),
    ("a number as key", "info={}", "info={3: 1}", "my_env.py:9", "the key 3", "by strings"),
    ("info is None", "info={}", "info=None", "my_env.py:9", "info=None", "give a dict"),
    ("messages() a string", OPENING, "'a question'", "my_env.py:7", "'a question' (str)", "[{'role': 'user'"),
    ("messages() empty", OPENING, "[]", "my_env.py:7", "[] (list)", "[{'role': 'user'"),
    (
        "a message of None",
        OPENING,
        "[{'role': 'user', 'content': None}]",
        "my_env.py:7",
        "None",
        "both strings",
    ),
    ("a message in parts", OPENING, "[{'content': [1]}]", "my_env.py:7", "[1]", "both strings"),
    ("an exception in step()", STEP, "{}['passed']", "my_env.py:9", "KeyError: 'passed'", "Correct it"),
    ("SystemExit in step()", STEP, "exit(3)", "my_env.py:9", "SystemExit: 3", "Correct it"),
    ("KeyError in episode()", "return Episode()", "{}['a']", "my_env.py", "KeyError: 'a'", "Correct it"),
    (
        "an exception in close()",
        "close(self): pass",
        "close(self): 1 / 0",
        "my_env.py:12",
        "ZeroDiv",
        "Correct it",
    ),
    ("finish() not done", "max_turns = 1", "max_turns = 0", "max_turns above 0", "Suite", "see Suite"),
    ("make_suite(config)", "(config, seed)", "(config)", "make_suite() raised", "TypeError", "Correct it"),
    (
        "a syntax error",
        "max_turns = 1",
        "max_turns = = 1",
        "my_env.py:15",
        "SyntaxError",
        "Correct that line",
    ),
    (
        "a module that raises",
        "import numpy",
        "1 / 0; import numpy",
        "my_env.py:2",
        "ZeroDivision",
        "Correct that",
    ),
    ("an import", "import numpy", "import nunpy, numpy", "env.suite", "'nunpy'", "install it"),
    ("no suite", "return Suite()", "return None", "env.suite", "NoneType", "see Suite"),
    (
        "splits() a string",
        '["held_out"]',
        '"held_out"',
        "my_env.py:16",
        "'held_out' (str)",
        "list of strings",
    ),
    ("no held-out split", '["held_out"]', "[]", "env.suite", "no held-out split", "validation needs one"),
    ("no instances", "range(9)", "range(0)", "env.suite", "'train'", "return one or more ids"),
    ("one id twice", "range(9)", "[0, 1, 1]", "env.suite", "'train1' 2 times", "return each id once"),
    ("train is held out", "split + str(n)", "str(n)", "env.suite", "such as '0'", "leave them out"),
    (
        "ids that change",
        "[split + str(n) for n in range(9)]",
        "[split + str(numpy.random.rand()) for n in range(9)]",
        "env.suite",
        "at position 0",
        "shuffled by random.Random(seed)",
    ),
    ("a log of 5 MB", "info={}", "info={'log': 'x' * 5_000_000}", "my_env.py:9", "5000000", "give at most"),
    ("numbers as ids", "split + str(n)", "n", "my_env.py:17", "[0, 1", "list of strings"),
    ("sandbox_counts None", "return 0, 0", "return None", "my_env.py:19", "None (NoneType)", "two integers"),
]
CORRECTIONS = [  # what the function returns, what, value, remedy
    ("a NaN", "TokenWeights(weights=inputs.ratio * float('nan'), mask=inputs.mask)", "weights", "not finite"),
    ("None", "None", "algo.user_correction", "NoneType"),
    ("an exception", "{}['x']", "own.py:3", "KeyError: 'x'"),
    ("another shape", "TokenWeights(weights=inputs.ratio[0], mask=inputs.mask)", "weights of shape", "(3,)"),
]


def write(name: str, content: str) -> Callable[[Path], object]:
    """Prepares one file."""

    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return prepare


def mistakes() -> Iterator[Mistake]:
    """All of them."""
    for line in SETTINGS.strip().splitlines():
        words, remedy, *other = [part.strip() for part in line.split(" | ")]
        given = shlex.split(words)
        key, _, value = given[-1].lstrip("+").partition("=")
        what, value = (other[:1] or [key])[0], (other[1:] or [value or given[-1]])[0]
        recipe = [] if words.startswith("recipe=") else ["+recipe=swe_rl"]
        yield Mistake(
            name=words, given=[*recipe, *given], what=what, value=value.strip("[]") or "[]", remedy=remedy
        )
    for name, files, what, value, remedy in FILES:
        given = ["+recipe=swe_rl", "model.path=model"]
        yield Mistake(name=name, given=given, what=what, value=value, remedy=remedy, files=files)
    for name, content, what, value, remedy in RECIPES:
        files = write("recipe/own.yaml", content)
        given = ["--config-dir", ".", "+recipe=own"]
        yield Mistake(name=f"recipe: {name}", given=given, what=what, value=value, remedy=remedy, files=files)
    for name, old, new, what, value, remedy in ENVIRONMENTS:
        assert ENVIRONMENT.count(old) >= 1, old
        files = write("my_env.py", ENVIRONMENT.replace(old, new, 1))
        given = ["+recipe=reasoning_rl", "env.suite=my_env:make_suite"]
        yield Mistake(name=f"env: {name}", given=given, what=what, value=value, remedy=remedy, files=files)
    for name, returned, what, value in CORRECTIONS:
        lines = ("from rlpipe.algo.rule import TokenWeights", "def weigh(inputs):", f"    return {returned}")
        files = write("own.py", "\n".join(lines))
        given = ["+recipe=swe_rl", "algo.correction=user", "algo.user_correction=own:weigh"]
        remedy = "rlpipe.algo.rule"
        yield Mistake(
            name=f"correction: {name}", given=given, what=what, value=value, remedy=remedy, files=files
        )
