"""Checks files, machine and user code before a run starts anything. The last column is on imports of torch.

    checkpoint   headers of the weights, tokenizer, chat template, vocabulary   no torch
    machine      device, GPUs, a Ray cluster's address, a W&B login             torch, for a GPU
    sizes        lower bounds of the memory and time that the settings need     no torch
    user code    algorithm names, a user's correction, run on two tokens        torch, if not the default

Every check raises ValueError with the problem, the value and a hint. Single settings are checked in `config`,
environments in `envs`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil

from rlpipe.config.algo import AlgoConfig, Correction
from rlpipe.config.metrics import WandbMode
from rlpipe.config.paths import resolve_model
from rlpipe.config.rollout import EngineKind
from rlpipe.config.run import ClusterMode, Config, Task
from rlpipe.config.spec import SpecMode
from rlpipe.config.user_code import described, raised_at
from rlpipe.metrics.sinks import logged_in
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import (
    check_dtypes,
    check_finite,
    check_weights,
    is_mtp_weight,
    read_config,
    read_json,
    weight_shapes,
)
from rlpipe.models.delta_net import check_kernel
from rlpipe.preflight.memory_estimate import conversation_bytes

_CONNECT_S = 3.0
_TRAJECTORY_BYTES = 4096  # size of the shortest trajectory and its record
_FLOPS = {"cpu": 5e10, "cuda": 1e15}  # FLOP/s of a CPU core and of a GPU: more than any of them reaches
_READ_AT_LAUNCH = 4 << 30  # weights up to this many bytes are read before the start
_OPEN_FILES = 512  # number of sockets, pipes and files that a small run with Ray needs, plus a reserve
_LONGEST_STEP_S = 86400.0
_QUESTION, _ANSWER = "question-marker", "answer-marker"


def check_surroundings(config: Config) -> None:
    """Run all checks of this module except `check_sizes`. Raises ValueError."""
    check_checkpoint("model.path", config.model.path, config)
    if config.decoupled.active:
        check_checkpoint("decoupled.path", config.decoupled.path, config)
    check_machine(config)
    check_algorithm(config.algo)


def check_checkpoint(setting: str, path: str, config: Config) -> None:
    """Compare the headers of the weights with the architecture; check the tokenizer. Raises ValueError."""
    directory = resolve_model(path, setting)
    hf_config = read_config(directory, setting)
    arch = read_architecture(hf_config)
    stored = weight_shapes(directory, setting)
    # A tied head is not stored, because it is the embedding.
    if "lm_head.weight" not in stored and arch.tied:
        stored["lm_head.weight"] = (arch.vocab, arch.hidden)

    # MTP weights must be complete if the run drafts with them; otherwise they are not read.
    served = setting == "decoupled.path" or not config.decoupled.active
    drafts = bool(arch.mtp_layers) and config.spec.needs_mtp and served
    optional = frozenset(name for name in stored if is_mtp_weight(name) and not drafts)
    expected = arch.weight_shapes(mtp=drafts)
    check_dtypes(directory, expected)

    try:
        check_weights({n: SimpleNamespace(shape=shape) for n, shape in stored.items()}, expected, optional)
    except ValueError as error:
        # Remove the hint from the message, because it is about weights sent to an engine.
        what = str(error).partition("Send every")[0].strip()
        raise ValueError(
            f"{setting}={path!r}: {what} Its config.json and its *.safetensors are not of one model: "
            "download the checkpoint again."
        ) from None
    # Reading larger weights takes too long here; engines and trainer check what they load.
    if sum(file.stat().st_size for file in directory.glob("*.safetensors")) <= _READ_AT_LAUNCH:
        check_finite(directory)
    check_tokenizer(setting, directory, arch.vocab)


def check_tokenizer(setting: str, directory: Path, vocabulary: int) -> None:
    """Refuse a tokenizer or chat template that is unreadable or unfit for the model. Raises ValueError."""
    where = f"{setting}={str(directory)!r}"
    settings = read_json(directory / "tokenizer_config.json", setting)
    stops = read_json(directory / "generation_config.json", setting).get("eos_token_id")
    file = directory / "tokenizer.json"
    others = ("tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
    if not file.is_file() and not any((directory / name).is_file() for name in others):
        raise ValueError(
            f"{where} has no tokenizer: {file} does not exist. Copy tokenizer.json and tokenizer_config.json "
            "there from the checkpoint that the model comes from."
        )

    # Only tokenizer.json can be read without transformers; the older formats are accepted unread.
    if file.is_file():
        read_json(file, setting)
        from tokenizers import Tokenizer

        try:
            ids = Tokenizer.from_file(str(file)).get_vocab().values()
        # The library `tokenizers` raises a bare Exception.
        except Exception as error:
            raise ValueError(
                f"{file} is not a tokenizer ({described(error)}). Copy tokenizer.json from the checkpoint "
                "that the model comes from."
            ) from None

        largest = max(ids, default=0)
        for name, token in (("tokenizer.json", largest), ("generation_config.json's eos_token_id", stops)):
            token = max(token) if isinstance(token, list) and token else token
            if isinstance(token, int) and token >= vocabulary:
                raise ValueError(
                    f"{where}: {name} has the token {token}, and config.json's vocab_size={vocabulary} ends "
                    f"at {vocabulary - 1}: use the tokenizer that the model was trained with."
                )
    _check_template(where, directory, settings)


def _check_template(where: str, directory: Path, settings: dict[str, Any]) -> None:
    """Refuse a chat template that is missing, fails, or omits a message. Raises ValueError.

    settings: contents of tokenizer_config.json, which may contain the template.
    """
    file = directory / "chat_template.jinja"
    inside = settings.get("chat_template")
    # A list contains several named templates.
    if isinstance(inside, list):
        inside = next((t.get("template") for t in inside if t.get("name") == "default"), None)

    place = file if file.is_file() else directory / "tokenizer_config.json"
    text = file.read_text(errors="replace") if file.is_file() else inside
    if not text:
        raise ValueError(
            f"{where} has no chat template: use an instruction-tuned checkpoint, add {file}, or set "
            "model.chat_template=FILE.jinja."
        )
    check_template(place, text)


def check_template(place: Path, text: str) -> None:
    """Refuse a chat template that fails or omits a message. place: the template's file. Raises ValueError."""
    try:
        rendered = render_template(text, bos_token="", eos_token="", tools=None)
    # A template is a program: it may raise anything.
    except Exception as error:
        line = getattr(error, "lineno", None) or _template_line(error)
        raise ValueError(
            f"{place}{f':{line}' if line and place.suffix != '.json' else ''}: the chat template fails with "
            f"{described(error)}. Correct it, or copy chat_template.jinja from the checkpoint that the model "
            "comes from."
        ) from None

    # Both messages of the test conversation must appear in the rendered text.
    if missing := [word for word in (_QUESTION, _ANSWER) if word not in rendered]:
        role = "user" if _QUESTION in missing else "assistant"
        raise ValueError(
            f"{place}: the chat template does not show the text of the {role}. Use an instruction-tuned "
            "checkpoint, or correct its chat_template.jinja."
        )


def render_template(text: str, **names: Any) -> str:
    """Render a conversation of two turns with a chat template.

    The result equals that of transformers, which is not used here because it loads torch.
    """
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, which marks what the model writes; only its body is rendered."""

        tags: ClassVar = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Return the statements between the tags."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        """Raise the error that a template reports with `raise_exception`."""
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )

    # Names that transformers defines for templates.
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}

    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    return environment.from_string(text).render(messages=turns, add_generation_prompt=False, **names)


def _template_line(error: BaseException) -> int | None:
    """Return the line of a template in which an error was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    return frames[-1].lineno if frames else None


def check_sizes(config: Config) -> None:
    """Refuse sizes that need too much memory or time even by the lowest estimate. Raises ValueError.

    The estimates are far below what a step really takes: they assume trajectories of one turn of one token.
    """
    rollout, spec, pipeline, task = config.rollout, config.spec, config.pipeline, config.task
    if rollout.max_new_tokens and spec.mode is not SpecMode.NONE and spec.depth > rollout.max_new_tokens:
        raise ValueError(
            f"spec.gamma={spec.gamma} drafts {spec.depth} tokens at a time, and a turn has at most "
            f"rollout.max_new_tokens={rollout.max_new_tokens}: lower it (3 to 8 is usual)."
        )

    arch = read_architecture(read_config(resolve_model(config.rollout_model)))
    remote, gpu = bool(config.cluster.address), rollout.device.startswith("cuda")
    memory = psutil.virtual_memory().total
    numbers = sum(math.prod(shape) for shape in arch.weight_shapes(mtp=False).values())

    # An embedded engine on a CPU has its KV rows and the logits of one step in this machine's memory.
    if not remote and not gpu and rollout.engine is EngineKind.EMBEDDED:
        _fits(
            f"rollout.max_running={rollout.max_running}",
            rollout.max_running * conversation_bytes(arch, config) * rollout.workers,
            memory,
            f"{rollout.max_running} rows of keys and values in {rollout.workers} workers",
        )
        logits = 4 * arch.vocab * (spec.drafts + 1) * rollout.max_running
        drafting = f"spec.tree={spec.tree}" if spec.mode is SpecMode.TREE else f"spec.gamma={spec.gamma}"
        _fits(drafting, logits, memory, "logits of a step")

    # Assume more speed than there is: 8 GPUs, or on a remote cluster 8 GPUs for each worker.
    speed = _FLOPS["cuda"] * 8 if gpu or remote else _FLOPS["cpu"] * (os.cpu_count() or 1)
    speed *= max(rollout.workers if remote else 1, 1)
    if task is Task.RL:
        attempts = pipeline.groups_ahead * pipeline.group_size
        ahead = attempts * (1 + pipeline.max_staleness)
        # The message names the setting with the largest value of these three.
        names = ("group_size", "prompts_per_step", "oversample")
        largest = max(names, key=lambda name: getattr(pipeline, name))
        sizes = f"pipeline.{largest}={getattr(pipeline, largest)}"

        if not remote:
            _fits(sizes, attempts * _TRAJECTORY_BYTES, memory, f"{attempts} attempts of a step")
            _fits(
                f"pipeline.max_staleness={pipeline.max_staleness}",
                ahead * _TRAJECTORY_BYTES,
                memory,
                f"{ahead} attempts in flight",
            )

        # A training step takes 6 floating-point operations per weight and token; a forward pass takes 2.
        _in_time(sizes, 6 * numbers * attempts / speed, f"one step of {attempts} attempts")
        attempts = config.val.samples * max(config.val.instances, 1)
        if config.val.every:
            what = f"one validation of {attempts} attempts"
            largest = "samples" if config.val.samples > config.val.instances else "instances"
            _in_time(f"val.{largest}={getattr(config.val, largest)}", 2 * numbers * attempts / speed, what)


def _fits(setting: str, needed: float, memory: int, what: str) -> None:
    """Raise ValueError if `needed` bytes exceed `memory` bytes. what: names their content."""
    if needed > memory:
        raise ValueError(
            f"{setting} is too large: {what} need at least {needed / 2**30:,.0f} GiB, and this machine has "
            f"{memory / 2**30:.0f} GiB. Lower it."
        )


def _in_time(setting: str, seconds: float, what: str) -> None:
    """Raise ValueError if `seconds` exceed the longest allowed step. what: names the work."""
    if seconds > _LONGEST_STEP_S:
        raise ValueError(
            f"{setting} is too large: {what} would take at least {seconds / 86400:,.0f} days on this "
            f"machine. Lower it."
        )


def check_machine(config: Config) -> None:
    """Refuse settings that name a missing device, cluster or login. Raises ValueError."""
    if config.metrics.wandb is WandbMode.ONLINE and not logged_in():
        raise ValueError(
            "metrics.wandb=online needs a login, and there is none: run `wandb login`, or set "
            "metrics.wandb=offline and upload later with `wandb sync`."
        )

    check_open_files()
    ray = config.cluster.mode is ClusterMode.RAY and config.task is Task.RL
    if ray and config.cluster.address:
        check_address(config.cluster.address)
    elif config.rollout.device.startswith("cuda") or (ray and config.cluster.share_gpus):
        _check_gpus(config, ray)


def check_open_files() -> None:
    """Increase this process's limit of open files to what a run needs. Raises ValueError if that fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _OPEN_FILES:
        return

    # A process may increase its soft limit up to the hard limit.
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES:
        raise ValueError(
            f"a process may open {hard} files here (ulimit -n), and a run needs {_OPEN_FILES}: run "
            f"`ulimit -n 4096` before it, or raise nofile in /etc/security/limits.conf."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, hard))


def _check_gpus(config: Config, ray: bool) -> None:
    """Refuse settings that need a missing device, or more GPUs than this machine has. Raises ValueError."""
    import torch

    device, count = config.rollout.device, torch.cuda.device_count()
    if not count:
        why = "this torch is a build for CPUs" if torch.version.cuda is None else "torch finds no GPU here"
        setting = f"rollout.device={device}" if device.startswith("cuda") else "cluster.share_gpus=true"
        raise ValueError(
            f"{setting}, and {why} (details: `rlpipe doctor`): set rollout.device=cpu, or "
            "cluster=ray or inline, which run without a GPU."
        )
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        raise ValueError(
            f"rollout.device={device}, and there are {count} GPUs: set cuda:0 to cuda:{count - 1}."
        )

    if config.run.half.trains and ray:
        path = resolve_model(config.model.path)
        if read_architecture(read_config(path)).delta:
            check_kernel(str(path))

    # Each engine and each trainer rank needs separate GPUs, unless engines and trainer share them.
    rollout, run_mode, shared = config.rollout, config.run.half, config.cluster.share_gpus
    served, ranks = (
        rollout.workers * rollout.gpus_per_worker * run_mode.generates,
        config.trainer.world_size * run_mode.trains,
    )
    needed = max(served, ranks) if shared else served + ranks
    if ray and needed > count:
        remedy = "lower them" if shared else "lower them, or use cluster=one_gpu"
        raise ValueError(
            f"rollout.workers={rollout.workers} of {rollout.gpus_per_worker} GPUs each and "
            f"trainer.tp * cp * pp * dp = "
            f"{config.trainer.world_size} need {needed} GPUs, and this machine has {count}: {remedy}."
        )


def check_address(address: str) -> None:
    """Refuse an address at which no Ray cluster answers. Raises ValueError."""
    remedy = (
        "start it (ray start --head --port=6379) and give HOST:6379, or leave cluster.address empty for a "
        "Ray of the run's own"
    )

    # For `auto`, read the address from where Ray itself reads it.
    where = address.removeprefix("ray://")
    if address == "auto":
        where = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://")
        file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        where = where or (file.read_text().strip() if file.is_file() else "")
        if not where:
            raise ValueError(f"cluster.address=auto, and no Ray cluster runs on this machine: {remedy}.")

    host, _, port = where.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"cluster.address={address!r} is not HOST:PORT: {remedy}.")

    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ValueError(
            f"cluster.address={address!r}: nothing answers at {where} ({error.strerror or error}): {remedy}."
        ) from None


def check_algorithm(config: AlgoConfig) -> None:
    """Refuse unknown verl names, and a user's correction that fails on two tokens. Raises ValueError."""
    # The default names are not checked, because importing verl takes seconds.
    default = AlgoConfig()
    if (config.advantage, config.policy_loss) != (default.advantage, default.policy_loss):
        from rlpipe.algo.policy_loss import check_names

        check_names(config)

    if config.correction is not Correction.USER:
        return
    import torch

    from rlpipe.algo.rule import CorrectionInputs
    from rlpipe.algo.user_correction import SETTING, UserCorrection

    rule = UserCorrection(config)
    # A rule on candidates reads values that only an engine has.
    if rule.needs_candidates:
        return

    # The test input is two tokens whose logprobs differ by 0.1 nats, and one position of padding.
    logprobs, mask = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    inputs = CorrectionInputs(
        trainer_logprobs=logprobs,
        rollout_logprobs=logprobs - 0.1 * mask,
        current_logprobs=logprobs,
        mask=mask,
        threshold=config.correction_threshold,
        low=config.correction_low,
    )

    try:
        rule.weigh(inputs)
    except ValueError as error:
        if str(error).startswith(SETTING):
            raise
        raise _raised(config, error) from error
    # The user's code may raise anything.
    except Exception as error:
        raise _raised(config, error) from error


def _raised(config: AlgoConfig, error: BaseException) -> ValueError:
    """Return the error that refuses a user's correction, given the error that this correction raised."""
    return ValueError(
        f"{raised_at(error)}: algo.user_correction={config.user_correction!r} raised {described(error)} on "
        "two tokens. Correct that line; rlpipe.algo.rule describes its arguments."
    )
