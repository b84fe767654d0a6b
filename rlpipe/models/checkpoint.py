"""Names and files of target and draft weights in a Hugging Face directory.

Owns names, reading and writing of `config.json` + safetensors; builds no model. The backbone's weights have
the names of Qwen2 / Qwen3 / Llama. The MTP layer is named `model.mtp_layers.0.*` as in MiMo's files:

    token_layernorm, hidden_layernorm, input_proj [H, 2H] over cat(hidden, embedding),
    one decoder layer (self_attn, mlp, input_layernorm, post_attention_layernorm), final_layernorm

Depth k at anchor t reads token t+k and the previous hidden state, at RoPE position t+k-1. This hidden state
is the backbone's final-norm output for k=1, and the MTP layer's final_layernorm output for k>1. The logits
come from the shared lm_head and predict token t+k+1.

Files and servers of other families name the MTP layer `model.layers.N`, where N is the number of layers.
`read_weights` and `weight_shapes` rename it; `write_checkpoint` and updates of servers restore that name
(`stored_name`). The MTP layer's copies of embedding and head are not read, because all depths share the
target's. Names that only Qwen3-Next and Qwen3.5 use are in `stored`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.models import stored

if TYPE_CHECKING:
    import torch

MTP_PREFIX = "model.mtp_layers.0."  # prefix of the first MTP layer
MTP_FILE = "mtp.safetensors"  # file in which `rlpipe graft` and `rlpipe fetch` store the MTP layer
APPENDED = ("glm4_moe", "deepseek_v3")  # families that number the MTP layer after the decoder layers
GRAFTED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)  # dense families to which `rlpipe graft` adds an MTP layer of MiMo's layout
_PLAIN = ("BF16", "F16", "F32", "F64")  # safetensors dtypes of weights that need no scales
_EXPONENTS = {  # safetensors dtype -> NumPy dtype of the same size, mask of the exponent bits
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
DRAFT_VOCAB = "draft_vocab.json"  # tokens that the MTP layer can draft, see `config.draft_vocab`
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def read_config(path: str | Path, setting: str = "model.path") -> dict[str, Any]:
    """Read `config.json` of a checkpoint directory, with the text model's settings at the top level.

    Args:
        setting: name of the setting that holds the path, for messages.

    Raises:
        ValueError: the path is not a Hugging Face checkpoint.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        if gguf := gguf_file(Path(path)):
            raise ValueError(
                f"{setting}={str(path)!r} is of llama.cpp's format, and a run reads Hugging Face's: "
                f"convert it with `rlpipe fetch {gguf} --out DIR`, then set {setting}=DIR."
            )

        kind = _kind(Path(path), setting) or "is not a Hugging Face checkpoint"
        raise ValueError(
            f"{setting}={str(path)!r} {kind}: {file} does not exist. "
            f"Point {setting} at a directory with config.json and *.safetensors."
        )

    config = read_json(file, setting)
    mtp = _holds_mtp(Path(path)) if stored.is_qwen_hybrid(config) else None
    return stored.plain_config(config, mtp=mtp)


def _kind(path: Path, setting: str) -> str:
    """Describe the content of a path without a checkpoint, and what to use instead; empty if unknown."""
    if (path / "adapter_config.json").is_file():
        base = read_json(path / "adapter_config.json", setting).get("base_model_name_or_path")
        return (
            f"is a PEFT adapter of {base!r}, not a model (merge it into its base with peft's "
            "merge_and_unload() and save_pretrained(DIR), then name DIR)"
        )

    # The path may be a run's checkpoint, its folder of checkpoints, or its directory.
    checkpoints = [*path.glob("step_*"), *path.glob("checkpoints/step_*")]
    newest = max((step for step in checkpoints if step.name[5:].isdigit()), key=_step_number, default=path)
    if (newest / "hf" / "config.json").is_file():
        what = "is a checkpoint of a run" if newest == path else "is of a run"
        return f"{what}, not a Hugging Face checkpoint (did you mean {setting}={newest / 'hf'}?)"
    if path.is_file():
        return f"is a file, not a directory (did you mean {setting}={path.parent}?)"
    return ""


def _step_number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def gguf_file(path: Path) -> Path | None:
    """Return `path` if it is a GGUF file, or the first GGUF file in this folder; None if there is none."""
    if path.is_dir():
        return next(iter(sorted(path.glob("*.gguf"))), None)
    return path if path.suffix == ".gguf" and path.is_file() else None


def _holds_mtp(path: Path) -> bool | None:
    """Return whether the files have tensors named `mtp.*`; None if no file can be read."""
    from safetensors import SafetensorError, safe_open

    names = list(read_json(path / "model.safetensors.index.json", "model.path").get("weight_map") or {})
    try:
        for file in [] if names else path.glob("*.safetensors"):
            with safe_open(file, framework="np") as opened:
                names += opened.keys()
    except (SafetensorError, OSError):
        return None
    return any(name.startswith(stored.MTP) for name in names) if names else None


def read_json(file: Path, setting: str) -> dict[str, Any]:
    """Read the JSON object in a file of a checkpoint; {} if there is no such file.

    Raises:
        ValueError: the file cannot be read, or is not a JSON object; the message names the line.
    """
    if not file.is_file():
        return {}

    hint = f"Copy it again from the checkpoint that the model comes from, or correct {setting}."
    try:
        content = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file}:{error.lineno}: not JSON at column {error.colno}: {error.msg}. {hint}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}). {hint}") from None

    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not an object {{...}}. {hint}")
    return content


def mtp_prefix(index: int) -> str:
    """Return the prefix of the names of an MTP layer's weights; the first depth has index 0."""
    return f"model.mtp_layers.{index}."


def has_mtp(config: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint declares an MTP layer (`num_nextn_predict_layers` >= 1)."""
    return int(config.get("num_nextn_predict_layers") or 0) >= 1


def require_mtp(config: Mapping[str, Any], path: str | Path, mode: str) -> None:
    """Refuse speculation without a draft, or in a mode that the draft does not support.

    Args:
        mode: `spec.mode`, or the task that uses the draft.

    Raises:
        ValueError: there is no MTP layer, or spec.mode=tree with a separate MTP layer for each depth.
    """
    if not has_mtp(config):
        raise ValueError(
            f"spec.mode={mode} drafts with an MTP layer, but {str(path)!r} has none "
            "(num_nextn_predict_layers is missing or 0). Use a checkpoint with "
            f"{MTP_PREFIX}* weights, or set spec.mode=none."
        )

    layers = int(config["num_nextn_predict_layers"])
    if layers > 1 and mode == "tree":
        raise ValueError(
            f"spec.mode=tree unrolls one MTP layer, but {str(path)!r} has {layers}, one per depth. "
            "Set spec.mode=rejection or spec.mode=block."
        )


def is_mtp_weight(name: str) -> bool:
    """Return whether a weight with this HF name belongs to the draft.

    >>> is_mtp_weight("model.mtp_layers.0.input_proj.weight"), is_mtp_weight("model.norm.weight")
    (True, False)
    """
    return name.startswith("model.mtp_layers.")


def stored_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the name of a weight in files and on servers.

    >>> config = {"model_type": "glm4_moe", "num_hidden_layers": 46, "num_nextn_predict_layers": 1}
    >>> stored_name("model.mtp_layers.0.enorm.weight", config)
    'model.layers.46.enorm.weight'
    >>> read_name("model.layers.46.enorm.weight", config), read_name("model.layers.45.mlp", config)
    ('model.mtp_layers.0.enorm.weight', 'model.layers.45.mlp')
    """
    if stored.is_qwen_hybrid(config):
        return stored.file_name(name, config)

    prefix = _draft_prefix_in_files(config)
    return prefix + name.removeprefix(MTP_PREFIX) if name.startswith(MTP_PREFIX) else name


def read_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the name of a weight that files call `name`; empty for a weight that is not read."""
    if stored.is_qwen_hybrid(config):
        return stored.hf_name(name, config)

    prefix = _draft_prefix_in_files(config)
    if not name.startswith(prefix):
        return name

    # The MTP layer's copies of embedding and head equal the target's, and are not read.
    suffix = name.removeprefix(prefix)
    return "" if prefix != MTP_PREFIX and suffix in _COPIES else MTP_PREFIX + suffix


def _draft_prefix_in_files(config: Mapping[str, Any]) -> str:
    """Return the prefix that files give to the weights of the first MTP layer."""
    appended = config.get("model_type") in APPENDED and has_mtp(config)
    return f"model.layers.{config['num_hidden_layers']}." if appended else MTP_PREFIX


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint by HF name, on the CPU; a tied `lm_head.weight` is included.

    Raises:
        ValueError: there is no safetensors file.
    """
    from safetensors.torch import load_file

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.path={str(path)!r} holds no *.safetensors file.")

    stored_weights: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = load_file(file)
        _check_finite(tensors, file)
        stored_weights.update(tensors)

    # Fused experts in files are split into one weight per expert.
    config = read_json(Path(path) / "config.json", "model.path")
    weights = {
        part: tensor[index] if index else tensor
        for name, tensor in stored_weights.items()
        if (hf_name := read_name(name, config))
        for part, index, _ in stored.split_experts(hf_name, tuple(tensor.shape))
    }
    if "lm_head.weight" not in weights and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def _check_finite(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Refuse weights that are not finite. Raises ValueError that names file and tensor."""
    for name, tensor in tensors.items():
        # If the sum, which is fast to compute, is finite, so is every weight. Large weights may overflow it.
        if tensor.is_floating_point() and not tensor.float().sum().isfinite():
            _require_finite(file, name, int((~tensor.isfinite()).sum()), tensor.numel())


def check_finite(path: str | Path) -> None:
    """Refuse weights that are not finite. Needs no torch, because it checks the bits in the files.

    Raises:
        ValueError: a weight is not finite; the message names file and tensor.
    """
    import numpy as np

    for file in sorted(Path(path).glob("*.safetensors")):
        content = np.memmap(file, mode="r", dtype=np.uint8)
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        for name, tensor in json.loads(content[8:start].tobytes()).items():
            kind, exponent = _EXPONENTS.get(tensor.get("dtype", ""), ("", 0))
            if kind:
                begin, end = (start + offset for offset in tensor["data_offsets"])
                bits = np.frombuffer(content[begin:end], dtype=kind)
                # NaN and the infinities have an exponent of only ones.
                wrong = int(np.count_nonzero((bits & exponent) == exponent))
                _require_finite(file, name, wrong, bits.size)


def _require_finite(file: Path, name: str, wrong: int, total: int) -> None:
    if wrong:
        raise ValueError(
            f"{file}: {wrong} of the {total} numbers of {name} are NaN or infinite. A run that diverged may "
            "have written them: take an earlier checkpoint, or download the model again."
        )


def weight_shapes(path: str | Path, setting: str = "model.path") -> dict[str, tuple[int, ...]]:
    """Return HF name -> shape of every stored tensor, from the files' headers; a tied head is not added.

    Args:
        setting: name of the setting that holds the path, for messages.

    Raises:
        ValueError: a file is missing or broken; the message names it.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(Path(path).glob("*.safetensors"))
    index = read_json(Path(path) / "model.safetensors.index.json", setting).get("weight_map") or {}
    named = {Path(path) / name for name in index.values()}
    if absent := sorted(file.name for file in named - set(files)):
        raise ValueError(
            f"{setting}={str(path)!r}: {_some(absent)} of model.safetensors.index.json is not there. "
            "Download the checkpoint again."
        )

    if not files:
        raise ValueError(
            f"{setting}={str(path)!r} holds no *.safetensors file: point it at a checkpoint with weights, or "
            "convert pytorch_model.bin with transformers' save_pretrained."
        )

    shapes: dict[str, tuple[int, ...]] = {}
    config = read_json(Path(path) / "config.json", setting)
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:
                shapes |= {
                    part: shape
                    for name in opened.keys()  # noqa: SIM118
                    if (hf_name := read_name(name, config))
                    for part, _, shape in stored.split_experts(
                        hf_name, tuple(opened.get_slice(name).get_shape())
                    )
                }
        except (SafetensorError, OSError) as error:
            size = file.stat().st_size if file.exists() else 0
            raise ValueError(
                f"{file} ({size} bytes) cannot be read: {error}. Is it cut off? Download it again."
            ) from None
    return shapes


def check_dtypes(path: str | Path, expected: Collection[str]) -> None:
    """Refuse weights that are stored as integers or 8-bit floats, because these need scales to be meaningful.

    Args:
        expected: HF names of weights; other tensors may have any dtype.

    Raises:
        ValueError: a weight has such a dtype; the message names file and tensor.
    """
    from safetensors import safe_open

    config = read_json(Path(path) / "config.json", "model.path")
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118
                stored_tensor = opened.get_slice(name)
                hf_name = read_name(name, config)
                parts = stored.split_experts(hf_name, tuple(stored_tensor.get_shape())) if hf_name else []
                if stored_tensor.get_dtype() in _PLAIN or not any(part in expected for part, *_ in parts):
                    continue
                raise ValueError(
                    f"{file}: {name} is stored as {stored_tensor.get_dtype()}: it is quantised, and "
                    "config.json has no quantization_config. Take the checkpoint that it was quantised "
                    "from, in bfloat16, float16 or float32."
                )


def check_weights(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], optional: frozenset[str]
) -> None:
    """Check that the weights have exactly the expected names and shapes.

    Args:
        optional: names that may be missing, or may be present without being expected.

    Raises:
        ValueError: weights are missing, unknown or of a wrong shape; the message names them.
    """
    problems = []
    if missing := sorted(expected.keys() - weights.keys() - optional):
        problems.append(f"missing {_some(missing)}")
    if unknown := sorted(weights.keys() - expected.keys() - optional):
        problems.append(f"unknown {_some(unknown)}")

    wrong = [
        f"{name} {tuple(weights[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != tuple(shape)
    ]
    if wrong:
        problems.append(f"wrong shape {_some(wrong)}")

    if problems:
        raise ValueError(
            f"The weights do not fit the model: {'; '.join(problems)}. "
            "Send every weight of the checkpoint under its Hugging Face name."
        )


def _some(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def write_checkpoint(path: str | Path, weights: Mapping[str, torch.Tensor], like: str | Path) -> None:
    """Write `weights` as one safetensors file, and copy config, tokenizer and draft vocabulary from `like`.

    A tied `lm_head.weight` (config `tie_word_embeddings`) is left out, as in transformers. Experts are fused
    if `like` has them fused. A vision tower, which is not read, is copied from `like`.
    """
    from safetensors.torch import save_file

    path, like = Path(path), Path(like)
    path.mkdir(parents=True, exist_ok=True)

    config = read_config(like)
    tied = bool(config.get("tie_word_embeddings"))
    tensors = {
        stored_name(name, config): tensor.detach().cpu().contiguous()
        for name, tensor in weights.items()
        if not (tied and name == "lm_head.weight")
    }
    if stored.is_qwen_hybrid(config):
        _restore_layout(tensors, like)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    if path.resolve() != like.resolve():
        for name in ("config.json", DRAFT_VOCAB, *TOKENIZER_FILES):
            if (like / name).is_file():
                shutil.copy2(like / name, path / name)


def _restore_layout(tensors: dict[str, torch.Tensor], like: Path) -> None:
    """Fuse the experts that are fused in the files of `like`, and add the vision tower of `like`."""
    from safetensors import safe_open

    for file in sorted(like.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if name.startswith(stored.VISION):
                    tensors[name] = opened.get_tensor(name)
                    continue

                shape = tuple(opened.get_slice(name).get_shape())
                experts = [(part, index) for part, index, _ in stored.split_experts(name, shape) if index]
                if experts and experts[0][0] in tensors:
                    fused = tensors[experts[0][0]].new_empty(shape)
                    for part, index in experts:
                        fused[index] = tensors.pop(part)
                    tensors[name] = fused
