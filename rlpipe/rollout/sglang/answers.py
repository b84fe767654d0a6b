"""Converts requests to SGLang's `/generate`, and its answers to `GenerateResult`.

Checked against SGLang 0.5.23: logprobs are the target's log-softmax(logits / temperature) at the sampled
token; `spec_correct_drafts_histogram[k]` counts verify steps that accepted exactly k drafts;
`weight_versions` lists spans [start, end) of output tokens.

With rlpipe's plugin, answers contain packed arrays (`sglang_env/plugin`, pack.py): logprobs, exact entropies
and, on request, the verify steps with p and q of every draft. SGLang itself returns no drafts and no
entropies. Without the plugin each entropy is estimated by -logprob of the sampled token. This is unbiased,
since E[-ln p(x)] = H(p), but single values are noisy.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from rlpipe.rollout.turn import next_route
from rlpipe.types import DraftStep, FinishReason, GenerateRequest, GenerateResult, SpecCounts
from rlpipe.weights.protocols import ServerError

_SEEDS = 2**31 - 1


def generate_body(request: GenerateRequest, rid: str, priority: int = 0) -> dict[str, Any]:
    """Return the JSON body of a generation request. rid: its id inside the server."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.prompt_ids.tolist(),
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            # SGLang interprets this as "no stop token of any kind"
            "ignore_eos": not sampling.stop_token_ids,
            "sampling_seed": sampling.seed % _SEEDS,
        },
        "return_logprob": True,
        "priority": priority,
    }

    if sampling.record_drafts:
        body["sampling_params"]["custom_params"] = {"rlpipe_drafts": True}
    if sampling.top_logprobs:
        body["top_logprobs_num"] = sampling.top_logprobs
    if sampling.routes:
        body |= {"return_routed_experts": True, "routed_experts_start_len": sampling.routes_from}
    return body


def parse_answer(
    request: GenerateRequest, answer: Mapping[str, Any], known: Sequence[int] | np.ndarray = ()
) -> GenerateResult:
    """Parse the answer to `generate_body(request)`, complete or partial.

    known: versions of the first tokens. SGLang lists versions only in the last part of a stream; until then,
    new tokens get the version that the server has when it sends them.

    Raises ServerError when lists that belong together have different lengths.
    """
    meta = answer["meta_info"]
    ids = answer["output_ids"]
    read = _packed if "rlpipe" in meta else _listed
    logprobs, entropies, top = read(request, meta, ids)

    # Only a complete answer lists the version of every token.
    if meta.get("finish_reason"):
        versions = token_versions(meta.get("weight_versions") or [], len(ids))
    else:
        versions = np.full(len(ids), int(meta["weight_version"]))
        versions[: len(known)] = known

    return GenerateResult(
        request_id=request.request_id,
        output_ids=np.array(ids, np.int32),
        logprobs=logprobs,
        entropies=entropies,
        versions=versions,
        finish_reason=_finish_reason(meta.get("finish_reason")),
        spec=spec_counts(meta),
        top_logprobs=top,
        drafts=_drafts(meta["rlpipe"]) if request.sampling.record_drafts and "rlpipe" in meta else None,
    )


_Top = list[list[tuple[int, float]]] | None


def _packed(
    request: GenerateRequest, meta: Mapping[str, Any], ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, _Top]:
    """Read logprobs, entropies and top logprobs of `ids` from the plugin's packed arrays."""
    column = partial(read_column, meta["rlpipe"])
    logprobs, entropies = column("logprobs"), column("entropies")
    if len(logprobs) != len(ids):
        raise _length_mismatch(request, ids, len(logprobs))
    if len(entropies) != len(ids) or np.isnan(entropies).any():
        num_entropies = np.count_nonzero(~np.isnan(entropies))
        raise ServerError(
            f"request {request.request_id!r}: {len(ids)} output ids came with {num_entropies} entropies."
        )

    top, count = None, request.sampling.top_logprobs
    if count:
        pairs = list(zip(column("top_ids", "i4").tolist(), column("top_logprobs").tolist(), strict=True))
        if len(pairs) != len(ids) * count:
            raise _length_mismatch(request, ids, len(pairs) // count)
        top = [pairs[first : first + count] for first in range(0, len(pairs), count)]
    return logprobs, entropies, top


def read_column(packed: Mapping[str, str], name: str, kind: str = "f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed.get(name, "")), kind)


def _drafts(packed: Mapping[str, str]) -> list[DraftStep]:
    """Read the verify steps from the plugin's packed arrays."""
    shapes = read_column(packed, "steps", "i4").tolist()
    kinds = (("drafts", "i4"), ("p", "f4"), ("q", "f4"))
    columns = [iter(read_column(packed, name, kind).tolist()) for name, kind in kinds]
    steps = []
    for position, count, accepted in zip(shapes[::3], shapes[1::3], shapes[2::3], strict=True):
        tokens, p, q = (list(islice(column, count)) for column in columns)
        step = DraftStep(
            position=position, tokens=tokens, target_probs=p, draft_probs=q, num_accepted=accepted
        )
        steps.append(step)
    return steps


def _listed(
    request: GenerateRequest, meta: Mapping[str, Any], ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, _Top]:
    """Read the result of `_packed` from SGLang's own lists, with estimated entropies."""
    logprobs = meta.get("output_token_logprobs") or []
    if [token for _, token, _ in logprobs] != ids:
        raise _length_mismatch(request, ids, len(logprobs))

    top = None
    if request.sampling.top_logprobs:
        rows = meta.get("output_top_logprobs") or []
        top = [[(int(token), float(value)) for value, token, _ in row] for row in rows[: len(ids)]]
    values = np.array([float(value) for value, _, _ in logprobs], np.float32)
    return values, -values, top


def _length_mismatch(request: GenerateRequest, ids: Sequence[int], count: int) -> ServerError:
    return ServerError(
        f"request {request.request_id!r}: {len(ids)} output ids and logprobs of {count} tokens do not belong "
        "together."
    )


def token_versions(spans: Sequence[Mapping[str, Any]], count: int) -> np.ndarray:
    """Expand spans to the policy version of each output token.

    Raises ServerError unless the spans tile 0..count - 1.

    >>> token_versions([{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}], 3)
    array([3, 3, 4], dtype=int32)
    """
    end = 0
    for span in spans:
        if span["start"] != end or span["end"] < end:
            raise ServerError(f"weight_versions do not join: {spans}")
        end = span["end"]
    if end != count:
        raise ServerError(f"weight_versions cover {end} of {count} tokens: {spans}")

    versions = np.empty(count, np.int32)
    for span in spans:
        versions[span["start"] : span["end"]] = int(span["version"])
    return versions


def spec_counts(meta: Mapping[str, Any]) -> SpecCounts:
    """Compute counts per depth from the histogram of accepted drafts; empty when no token was drafted.

    >>> meta = {"spec_verify_ct": 4, "spec_num_proposed_drafts": 8}
    >>> counts = spec_counts(meta | {"spec_correct_drafts_histogram": [1, 2, 1]})
    >>> counts.drafted, counts.accepted, counts.acceptance_length
    ([4, 3], [3, 1], 2.0)
    """
    steps = int(meta.get("spec_verify_ct") or 0)
    if not steps:
        return SpecCounts()

    proposed = int(meta["spec_num_proposed_drafts"])
    depth = proposed // steps
    histogram = [int(count) for count in meta["spec_correct_drafts_histogram"]]
    histogram += [0] * (depth + 1 - len(histogram))  # SGLang omits zeros at the end

    # rlpipe's plugin counts separately for each number of drafts: entry w (w + 1) / 2 + k for k accepted of w
    # drafts
    if len(histogram) > depth + 1:
        entries = [(w, k, histogram[w * (w + 1) // 2 + k]) for w in range(depth + 1) for k in range(w + 1)]
        return SpecCounts(
            drafted=[sum(n for w, k, n in entries if w > d and k >= d) for d in range(depth)],
            accepted=[sum(n for _, k, n in entries if k > d) for d in range(depth)],
            verify_steps=steps,
            proposed=sum(w * n for w, _, n in entries),
        )

    at_least = [sum(histogram[k:]) for k in range(depth + 1)]
    return SpecCounts(drafted=at_least[:-1], accepted=at_least[1:], verify_steps=steps, proposed=proposed)


def _finish_reason(reason: Mapping[str, Any] | None) -> FinishReason:
    """Map the finish reason of an answer; an incomplete answer has none and gets ABORT."""
    kind = reason["type"] if reason else "abort"
    return {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(kind, FinishReason.ABORT)


def continuation(request: GenerateRequest, done: GenerateResult) -> GenerateRequest:
    """Return the request for the remaining tokens of a turn, with another seed."""
    sampling = replace(
        request.sampling,
        max_new_tokens=request.sampling.max_new_tokens - len(done.output_ids),
        seed=request.sampling.seed + len(done.output_ids),
        routes_from=max(request.sampling.routes_from, next_route(None, done)),
    )
    return replace(
        request, prompt_ids=np.concatenate((request.prompt_ids, done.output_ids)), sampling=sampling
    )
