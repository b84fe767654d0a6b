"""Packs log-probabilities and entropies of an answer in arrays, instead of JSON for each token.

`meta_info["rlpipe"]` contains base64 of little-endian arrays with one entry per output token:

    logprobs, entropies        float32 [n]
    top_logprobs, top_ids      float32, int32 [n * k], if the k most likely tokens were requested

and, if drafts were requested (`record`), arrays for the verify steps in order:

    steps                      int32 [s * 3]: position of the first draft, number of drafts, number accepted
    drafts, p, q               int32, float32, float32 [number of drafts]

`output_token_logprobs` and `output_top_logprobs` are then omitted. A request for log-probabilities of its
prompt, or of tokens that it names, is answered as without the plugin.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from rlpipe_sglang import record
from rlpipe_sglang.measure import KEY

FIELD = "rlpipe"


def packed(
    original: Callable, manager: Any, meta: dict[str, Any], state: Any, top: int, named: Any, *rest, **more
) -> None:
    """Around `TokenizerManager.add_logprob_to_meta_info`: add packed arrays. state: the request's state."""
    if named is not None or state.input_token_logprobs_val:
        original(manager, meta, state, top, named, *rest, **more)
        return
    columns = state.__dict__.setdefault("rlpipe_columns", {})
    _grow(columns, "logprobs", "f", state.output_token_logprobs_val)
    columns.setdefault("entropies", array("f"))
    if top:
        _grow(columns, "top_logprobs", "f", state.output_top_logprobs_val, top)
        _grow(columns, "top_ids", "i", state.output_top_logprobs_idx, top)
    meta[FIELD] = {name: _text(values) for name, values in columns.items()}


def noted(
    original: Callable,
    manager: Any,
    meta: dict[str, Any],
    state: Any,
    info: Mapping[str, list],
    index: int,
    reason: Any,
) -> None:
    """Around `TokenizerManager.update_request_meta_info`, called after `packed`: add entropies and drafts."""
    others = {name: values for name, values in info.items() if name not in (KEY, record.KEY)}
    original(manager, meta, state, others, index, reason)
    if KEY in info and FIELD in meta:
        entropies = state.rlpipe_columns["entropies"]
        entropies.extend(float("nan") if value is None else value for value in info[KEY][index])
        meta[FIELD]["entropies"] = _text(entropies)
    if record.KEY in info and FIELD in meta:
        columns = state.rlpipe_columns
        for position, accepted, *step in filter(None, info[record.KEY][index]):
            columns.setdefault("steps", array("i")).extend((position, len(step[0]), accepted))
            for name, values in zip(("drafts", "p", "q"), step, strict=True):
                columns.setdefault(name, array("i" if name == "drafts" else "f")).extend(values)
        meta[FIELD] |= {n: _text(columns[n]) for n in ("steps", "drafts", "p", "q") if n in columns}


def _grow(columns: dict[str, array], name: str, kind: str, rows: list, width: int = 0) -> None:
    """Append the new entries of `rows`: numbers or, with `width`, lists of `width` numbers."""
    column = columns.setdefault(name, array(kind))
    new = rows[len(column) // (width or 1) :]
    column.extend(chain.from_iterable(new) if width else new)


def _text(values: array) -> str:
    return base64.b64encode(values).decode()
