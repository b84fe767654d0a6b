"""`rlpipe draft-vocab MODEL DATA ... --size N`: chooses the draft vocabulary of an MTP layer.

Counts tokens in rollouts or text, selects the most frequent ones and all special tokens, and writes the table
for `spec.draft_vocab`. Coverage is measured on text that was not counted: a table from one half of the
documents is applied to the other half.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.config.draft_vocab import choose_draft_vocab, coverage, write_table
from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.metrics.rollouts import read_rollouts
from rlpipe.models.checkpoint import DRAFT_VOCAB, read_config, read_json


def sampled_tokens(record: Mapping[str, Any]) -> list[int]:
    """Return the sampled tokens in one line of a rollout file; [] for a line without tokens.

    >>> sampled_tokens({"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    [6, 7]
    >>> sampled_tokens({"tokens": [5, 6, 7, 8], "turns": [{"role": "assistant", "span": [1, 3]}]})
    [6, 7]
    """
    if "loss_mask" in record:
        pairs = zip(record["token_ids"], record["loss_mask"], strict=True)
        return [token for token, sampled in pairs if sampled]

    spans = (turn["span"] for turn in record.get("turns", ()) if turn["role"] == "assistant")
    return [token for span in spans if span for token in record["tokens"][slice(*span)]]


def documents(path: Path, model: Path) -> Iterator[list[int]]:
    """Yield the tokens of each document in a run directory, a file of rollouts (.jsonl), or a text file.

    In a text file, each line is a document. model: directory of the tokenizer. Raises ValueError for any
    other path.
    """
    if path.is_dir() or path.suffix == ".jsonl":
        records = read_rollouts(path) if path.is_dir() else iter(read_jsonl(path)[0])
        yield from filter(None, map(sampled_tokens, records))
        return

    if not path.is_file():
        raise ValueError(
            f"DATA={str(path)!r} does not exist: name a run directory, rollouts, or a text file."
        )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for line in path.read_text().splitlines():
        if line.strip():
            yield tokenizer(line, add_special_tokens=False)["input_ids"]


def special_tokens(model: Path, vocab: int) -> list[int]:
    """Return the ids of a checkpoint's special tokens and end-of-text tokens that are below `vocab`."""
    added = read_json(model / "tokenizer.json", "MODEL").get("added_tokens") or []
    stops = read_json(model / "generation_config.json", "MODEL").get("eos_token_id")
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    special = {token["id"] for token in added if token.get("special")} | set(stops)
    return sorted(token for token in special if token < vocab)


def choose(model: Path, data: Sequence[Path], size: int) -> tuple[list[int], float]:
    """Choose a draft vocabulary for a checkpoint; return its tokens and its coverage of unseen text.

    Raises ValueError for data without tokens, for tokens of another model, or for an invalid size.
    """
    vocab = int(read_config(model, "MODEL")["vocab_size"])
    counts = np.zeros((2, vocab), np.int64)
    index = -1
    for index, tokens in enumerate(document for path in data for document in documents(path, model)):
        if max(tokens) >= vocab:
            raise ValueError(
                f"DATA has the token {max(tokens)}, and MODEL={str(model)!r} has tokens 0 to {vocab - 1}: "
                "name rollouts of this model."
            )
        counts[index % 2] += np.bincount(tokens, minlength=vocab)
    if index < 1:
        raise ValueError(f"DATA={[str(path) for path in data]} holds fewer than two documents with tokens.")

    # Measure the table from each half on the other half; choose the final table from all documents.
    special = special_tokens(model, vocab)
    shares = [coverage(counts[1 - i], choose_draft_vocab(counts[i], size, special)) for i in range(2)]
    return choose_draft_vocab(counts.sum(0), size, special), float(np.mean(shares))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a draft vocabulary and print its coverage; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="rlpipe draft-vocab",
        description="Choose the tokens that an MTP layer drafts among (spec.draft_vocab).",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="checkpoint directory")
    parser.add_argument(
        "data",
        type=Path,
        nargs="+",
        metavar="DATA",
        help="run directory, rollouts of `mtp_adapt` (.jsonl), or text",
    )
    parser.add_argument("--size", type=int, required=True, help="number of tokens")
    parser.add_argument("--out", type=Path, help=f"file to write (MODEL/{DRAFT_VOCAB})")
    options = parser.parse_args(arguments)

    out = options.out or options.model / DRAFT_VOCAB
    try:
        tokens, share = choose(options.model, options.data, options.size)
        write_table(out, tokens)
    except (ValueError, OSError) as error:
        print(f"rlpipe draft-vocab: {error}", file=sys.stderr)
        return 2

    print(f"wrote {len(tokens)} tokens to {out}; they cover {share:.2%} of text that did not choose them")
    return 0
