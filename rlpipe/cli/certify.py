"""`rlpipe certify URL --model PATH`: tests whether a server's tokens have its model's distribution."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlpipe.certify.dialects import Prompt
    from rlpipe.certify.run import Certificate
    from rlpipe.certify.texts import Texts

PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "Once upon a time there was a",
    "The answer to 12 + 7 is",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Certify a server; return 0 if no fault was found, 1 if one was found, 2 if it cannot be tested."""
    options = _parser().parse_args(arguments)

    from rlpipe.weights.protocols import ServerError, ServerUnreachable

    try:
        certificate = _certify(options)
    except (ValueError, OSError, ServerError, ServerUnreachable) as error:
        print(f"rlpipe certify: {error}", file=sys.stderr)
        return 2

    from rlpipe.certify.page import as_html, as_json, as_text

    print(as_text(certificate))
    if options.json:
        options.json.write_text(as_json(certificate) + "\n", encoding="utf-8")
    if options.out:
        options.out.write_text(as_html(certificate), encoding="utf-8")
        print(f"page: {options.out}")
    return 0 if certificate.passed else 1


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="rlpipe certify",
        description="Sample a server and test whether its tokens have its model's distribution: SGLang, or "
        "one with OpenAI's /v1/completions or /v1/chat/completions, such as vLLM. Exit status 0: no fault "
        "found; 1: a fault; 2: it cannot be judged.",
    )
    parser.add_argument("url", metavar="URL", help="http://HOST:PORT of the server")
    parser.add_argument("--model", required=True, metavar="PATH", help="the checkpoint it serves")
    parser.add_argument(
        "--samples", type=int, default=4000, help="at temperature 1; half as many at 0.7 (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=0, help="of each sample (6, or four more than gamma)")
    parser.add_argument(
        "--alpha", type=float, default=0.01, help="false-alarm rate of all lines together (%(default)s)"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one a line (four short ones)")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="the server's EAGLE-3 draft")
    parser.add_argument(
        "--dtype", default="", help="number format of the server (default: the server's or config.json's)"
    )
    parser.add_argument("--name", default="", help="of the model in requests (the first of /v1/models)")
    parser.add_argument(
        "--body", type=json.loads, default={}, metavar="JSON", help="fields of every OpenAI request"
    )
    parser.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", ""), help="($OPENAI_API_KEY)")
    parser.add_argument("--seed", type=int, default=0, help="of the tests' simulations (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="HTML page to write")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON to write")
    return parser


def _certify(options: argparse.Namespace) -> Certificate:
    """Sample the server, and return the resulting certificate. Raises ValueError for bad options."""
    _check(options)

    import asyncio

    from rlpipe.certify.dialects import Server, served_dtype
    from rlpipe.certify.own_draft import own_draft
    from rlpipe.certify.reference import TransformersModel
    from rlpipe.certify.run import Sizes, collect, judge
    from rlpipe.cli.main import version
    from rlpipe.config.paths import resolve_model

    path = resolve_model(options.model, "--model")
    tokenizer = _tokenizer(path)
    prompts = _prompts(options.prompts, tokenizer, path)
    if not isinstance(options.body, Mapping):
        raise ValueError(f"--body {options.body!r} is not a JSON object.")

    async def sample() -> Certificate:
        server = await Server.open(
            options.url, prompts[0], key=options.key, name=options.name, extra=options.body
        )
        try:
            # An option replaces what the server does not report.
            features = server.features
            features.dtype = options.dtype or served_dtype(features.dtype, _stored_dtype(path))

            # `draft` counts accepted drafts of the checkpoint, or is the reason why acceptance is not tested.
            draft = own_draft(path, options.draft, features)
            chat = features.dialect == "OpenAI chat"
            evidence, seconds = await collect(
                server,
                TransformersModel(path, features.dtype),
                _as_messages(prompts, path) if chat else prompts,
                Sizes(samples=options.samples, tokens=options.tokens),
                texts=tokenizer,
                own_draft=None if isinstance(draft, str) else draft,
                why_no_draft=draft if isinstance(draft, str) else "",
                progress=lambda text: print(text, file=sys.stderr),
            )
        finally:
            await server.close()

        certificate = judge(evidence, alpha=options.alpha, seed=options.seed)
        certificate.seconds |= seconds
        return certificate

    certificate = asyncio.run(sample())
    certificate.about = {
        "url": options.url,
        "model": options.model,
        "samples": options.samples,
        "dtype": certificate.features.dtype,
        "fields": json.dumps(options.body),
        "date": time.strftime("%Y-%m-%d"),
        "rlpipe": version(),
    }
    return certificate


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for options with which no certificate is possible."""
    if options.samples < 100:
        raise ValueError(f"--samples {options.samples} sees nothing: take at least 100, better 4000.")
    if not 0 < options.alpha < 0.5:
        raise ValueError(f"--alpha {options.alpha} is not a false-alarm rate: choose 0.01, or 0.001.")
    if options.tokens < 0:
        raise ValueError(f"--tokens {options.tokens} is negative: leave it out, or give 6.")
    if options.dtype not in ("", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {options.dtype!r} is unknown: choose float32, bfloat16 or float16.")


def _tokenizer(path: Path) -> Texts | None:
    """Return the texts of a checkpoint's tokens; None if it has no tokenizer."""
    from rlpipe.certify.texts import Texts
    from rlpipe.rollout.chat import read_tokenizer

    if not (path / "tokenizer_config.json").is_file() and not (path / "tokenizer.json").is_file():
        return None
    return Texts(read_tokenizer(path))


def _prompts(file: Path | None, texts: Texts | None, path: Path) -> list[Prompt]:
    """Return the prompts with their ids. Raises ValueError for an unreadable or unusable file."""
    import numpy as np

    from rlpipe.certify.dialects import Prompt
    from rlpipe.models.checkpoint import read_config

    if texts is None:  # without a tokenizer, use arbitrary ids
        if file is not None:
            raise ValueError(f"--prompts {file}: {path} has no tokenizer to read them with.")
        rows = np.random.default_rng(0).integers(2, read_config(path)["vocab_size"], (4, 4))
        return [Prompt(text="", ids=row.tolist()) for row in rows]

    lines = list(PROMPTS)
    if file is not None:
        lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"--prompts {file} has no line: write a prompt on each.")
    return [Prompt(text=text, ids=texts.encode(text)) for text in lines]


def _as_messages(prompts: Sequence[Prompt], path: Path) -> list[Prompt]:
    """Return the prompts as user messages, rendered by the chat template of a checkpoint."""
    from rlpipe.certify.dialects import Prompt
    from rlpipe.rollout.chat import ChatFormat

    chat = ChatFormat.from_pretrained(path)
    return [
        Prompt(text=prompt.text, ids=chat.initial([{"role": "user", "content": prompt.text}]))
        for prompt in prompts
    ]


def _stored_dtype(path: Path) -> str:
    """Return the dtype of a checkpoint's weights, which servers use unless an option changes it."""
    from rlpipe.models.checkpoint import read_config

    config: dict[str, Any] = read_config(path)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
