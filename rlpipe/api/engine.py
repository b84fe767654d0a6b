"""An engine that generates from Python with speculative decoding, and reports details of each token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from rlpipe.config.drafters import Drafter
from rlpipe.config.paths import resolve_model
from rlpipe.config.rollout import Dtype, RolloutConfig
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.loop.event_loop import run_coroutine
from rlpipe.metrics.rollouts import accepted_depths
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.embedded.engine import EmbeddedEngine
from rlpipe.types import DraftStep, GenerateRequest, GenerateResult, SamplingParams, SpecCounts

Prompt = str | Sequence[int]


@dataclass(slots=True, kw_only=True)
class Generation:
    """One generated turn; the lists are parallel, one entry per generated token.

    prompt_ids: token ids of the prompt. text: the generated text. ids, texts: id and text of each generated
    token. logprobs, entropies: computed by the target model, nats. depths: 0 for a token that the target
    sampled, k for a token accepted as the k-th draft. drafts: every verify step, with accepted and rejected
    draft tokens. counts: numbers of drafted and accepted tokens, by depth.
    finish_reason: stop, length or abort.
    """

    prompt_ids: list[int]
    text: str
    ids: list[int]
    texts: list[str]
    logprobs: list[float]
    entropies: list[float]
    depths: list[int]
    drafts: list[DraftStep]
    counts: SpecCounts
    finish_reason: str

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per token, which `pandas.DataFrame` accepts unchanged."""
        columns = (self.ids, self.texts, self.logprobs, self.entropies, self.depths)
        names = ("id", "text", "logprob", "entropy", "depth")
        return [
            dict(zip(names, values, strict=True)) | {"drafted": values[-1] > 0}
            for values in zip(*columns, strict=True)
        ]


class Engine:
    """The embedded engine with a blocking interface; works in a notebook. Close it, or use it with `with`.

    Args:
        path: Hugging Face checkpoint directory, "shipped:models/tiny", or the name of a
            model that `rlpipe fetch` has stored, such as "smollm2".
        mode: verification rule; "none" decodes without drafts.
        gamma: draft tokens per verify step.
        drafter: "mtp", "suffix" or "eagle3"; "eagle3" needs the directory of the draft as `draft_path`.
        max_context: maximum number of tokens of a prompt and its generation together.
        device: "auto", "cpu", "cuda" or "cuda:1".
        dtype: type of the weights and the KV cache.

    Raises:
        ValueError: the engine cannot run this model, or the settings do not fit it.
    """

    def __init__(
        self,
        path: str | Path = "shipped:models/tiny",
        *,
        mode: SpecMode | str = SpecMode.REJECTION,
        gamma: int = 3,
        drafter: Drafter | str = Drafter.MTP,
        draft_path: str = "",
        max_context: int = 512,
        device: str = "auto",
        dtype: Dtype | str = Dtype.FLOAT32,
    ) -> None:
        directory = resolve_model(str(path), "path")
        spec = SpecConfig(mode=SpecMode(mode), gamma=gamma, drafter=Drafter(drafter), draft_path=draft_path)
        rollout = RolloutConfig(max_context=max_context, device=device, dtype=Dtype(dtype))
        self._chat = ChatFormat.from_pretrained(directory)
        self._engine = EmbeddedEngine(rollout, spec, directory)
        self._request_numbers = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 48,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> list[Generation]:
        """Generate one turn for each prompt; all prompts share a batch.

        Args:
            prompts: one prompt or several. A text becomes a user message in the model's chat template; a list
                of token ids is used unchanged.
            max_new_tokens: upper bound; a stop token ends a turn earlier.
            temperature: 0 decodes greedily.
            seed: equal seeds give equal tokens; prompt n samples with seed + n.

        Returns:
            One generation per prompt, in order.
        """
        one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        batch = cast("Sequence[Prompt]", [prompts] if one else prompts)  # mypy cannot infer this from `one`

        requests = [
            GenerateRequest(
                request_id=f"generate-{next(self._request_numbers)}",
                prompt_ids=self._ids(prompt),
                sampling=SamplingParams(
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    stop_token_ids=self._chat.stop_token_ids,
                    seed=seed + number,
                    record_drafts=True,
                ),
            )
            for number, prompt in enumerate(batch)
        ]

        results = run_coroutine(self._generate(requests))
        return [self._generation(*pair) for pair in zip(requests, results, strict=True)]

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        return await asyncio.gather(*(self._engine.generate(request) for request in requests))

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._chat.initial([{"role": "user", "content": prompt}])
        return list(prompt)

    def _generation(self, request: GenerateRequest, result: GenerateResult) -> Generation:
        """Convert an engine's result to plain lists, and add the text of each token."""
        ids, drafts = result.output_ids.tolist(), result.drafts or []
        return Generation(
            prompt_ids=request.prompt_ids.tolist(),
            text=self._chat.decode(ids),
            ids=ids,
            texts=self._chat.token_texts(ids),
            logprobs=result.logprobs.tolist(),
            entropies=result.entropies.tolist(),
            depths=accepted_depths([1] * len(ids), drafts),
            drafts=drafts,
            counts=result.spec,
            finish_reason=str(result.finish_reason),
        )
