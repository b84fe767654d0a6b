"""The API of a server (SGLang's `/generate`, OpenAI's completions or chat) and the features that it supports.

Servers ignore unknown fields, so a feature counts only if its effect is visible in an answer:

| feature  | field                                                | without it                        |
| ids in   | input_ids; a list of ids as `prompt`                 | the server tokenises text         |
| ids out  | output_ids; token_ids; "token_id:N"; rows with ids   | texts of first tokens are tested  |
| logprobs | output_token_logprobs; token_logprobs; content       | log-probabilities are not tested  |
| copies   | `n`                                                  | one request for each sample       |
| drafts   | meta_info.spec_*                                     | acceptance is not tested          |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlpipe.rollout.sglang.answers import spec_counts
from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.weights.protocols import ServerError, ServerUnreachable

AT_ONCE = 32  # maximum number of requests in flight
_COPIES = 32  # maximum number of samples of one request


@dataclass(slots=True, kw_only=True)
class Prompt:
    """A prompt. text: for servers that accept no ids. ids: its tokens in the checkpoint's tokenizer."""

    text: str
    ids: list[int]


@dataclass(slots=True, kw_only=True)
class Answer:
    """One sampled continuation.

    ids: tokens; None if the server returns only text. logprobs: reported log-probability of each token.
    accepted: number of accepted drafts. verify_steps: number of verify steps; 0 if the server does not report
    drafts.
    """

    text: str = ""
    ids: list[int] | None = None
    logprobs: list[float] | None = None
    accepted: int = 0
    verify_steps: int = 0


@dataclass(slots=True, kw_only=True)
class Features:
    """The features of a server.

    gamma: draft tokens per verify step. mode: verification rule, if the server reports it. dtype: reported
    type of the weights; "auto" if the server chooses it from the checkpoint, "" if it does not report it.
    """

    dialect: str
    ids_in: bool = False
    ids_out: bool = False
    logprobs: bool = False
    copies: bool = False
    ignore_eos: bool = False
    drafts: bool = False
    gamma: int = 0
    mode: str = ""
    dtype: str = ""

    def missing(self) -> list[str]:
        """Return texts that name the missing features."""
        words = {
            "ids_in": "takes no token ids",
            "ids_out": "returns no token ids",
            "logprobs": "returns no log-probabilities",
            "drafts": "reports no acceptance",
        }
        return [text for name, text in words.items() if not getattr(self, name)]


class Dialect(Protocol):
    """A format of requests for samples: path, body, and parser of the answers."""

    @property
    def path(self) -> str:
        """Return the path of requests."""
        ...

    def body(self, prompt: Prompt, *, count: int, temperature: float, tokens: int) -> dict[str, Any]:
        """Return the body of a request for `count` samples."""
        ...

    def read(self, answer: Any) -> list[Answer]:
        """Return the samples in an answer."""
        ...


@dataclass(slots=True, kw_only=True)
class Generate:
    """SGLang's native API, `/generate`."""

    features: Features
    path: str = "/generate"

    def body(self, prompt: Prompt, *, count: int, temperature: float, tokens: int) -> dict[str, Any]:
        """Return the body of a request; the samples of one request are independent."""
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True, "n": count}
        return {"input_ids": prompt.ids, "sampling_params": sampling, "return_logprob": True}

    def read(self, answer: Any) -> list[Answer]:
        """Return the samples in an answer, with their numbers of accepted drafts."""
        answers = []
        for one in answer if isinstance(answer, list) else [answer]:
            meta = one["meta_info"]
            spec = spec_counts(meta)
            listed = meta.get("output_token_logprobs")
            answers.append(
                Answer(
                    ids=one["output_ids"],
                    text=one.get("text") or "",
                    logprobs=[float(row[0]) for row in listed] if listed else _packed_logprobs(meta),
                    accepted=sum(spec.accepted),
                    verify_steps=spec.verify_steps,
                )
            )
        return answers


def _packed_logprobs(meta: Mapping[str, Any]) -> list[float] | None:
    """Return the log-probabilities that rlpipe's SGLang plugin packs into an answer, or None."""
    if "rlpipe" not in meta:
        return None
    from rlpipe.rollout.sglang.answers import read_column

    return read_column(meta["rlpipe"], "logprobs").tolist()


@dataclass(slots=True, kw_only=True)
class OpenAI:
    """OpenAI's `/v1/completions` or `/v1/chat/completions`, as implemented by vLLM, SGLang, transformers and
    llama.cpp.

    model: name of the model in requests. requested: features to request. extra: further fields of every
    request.
    """

    model: str
    chat: bool = False
    requested: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Return the path of requests."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: Prompt, *, count: int, temperature: float, tokens: int) -> dict[str, Any]:
        """Return the body of a request, with the fields of the requested features."""
        body: dict[str, Any] = {"model": self.model, "temperature": temperature, "max_tokens": tokens}
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.ids if "ids_in" in self.requested else prompt.text

        if count > 1:
            body["n"] = count
        if "ids_out" in self.requested:
            body["return_token_ids"] = True
        if "logprobs" in self.requested:
            body["logprobs"] = True if self.chat else 1
        if "ignore_eos" in self.requested:
            body["ignore_eos"] = True
        return {**body, **self.extra}

    def read(self, answer: Any) -> list[Answer]:
        """Return the samples in an answer, with ids and logprobs if the choices have them."""
        return [self._read_choice(choice) for choice in answer["choices"]]

    def _read_choice(self, choice: Mapping[str, Any]) -> Answer:
        """Return the text, ids and log-probabilities of one choice of an answer."""
        text = (choice.get("message") or {}).get("content") if self.chat else choice.get("text")
        listed = choice.get("logprobs") or {}

        # Chat answers, and completions of llama.cpp, have a row for each token; others have columns.
        rows = listed.get("content") or []
        tokens = [row["token"] for row in rows] or listed.get("tokens") or []
        logprobs = [_logprob(row) for row in rows] or listed.get("token_logprobs") or []

        # vLLM returns ids in a field, and older versions in the token texts; llama.cpp in the rows.
        ids = choice.get("token_ids")
        numbered = [str(token).removeprefix("token_id:") for token in tokens]
        if ids is None and rows and all("id" in row for row in rows):
            ids = [int(row["id"]) for row in rows]
        elif ids is None and tokens and all(str(t).startswith("token_id:") for t in tokens):
            ids = [int(number) for number in numbered]
        return Answer(text=text or "", ids=ids, logprobs=[float(value) for value in logprobs] or None)


def _logprob(row: Mapping[str, Any]) -> float:
    """Return a token's log-probability. With `post_sampling_probs`, llama.cpp gives the probability."""
    if "logprob" in row:
        return float(row["logprob"])
    return math.log(row["prob"]) if row["prob"] else -math.inf


class Server:
    """Client of a running server, for use in one event loop; `open` detects dialect and features."""

    def __init__(self, client: SglangClient, dialect: Dialect, features: Features) -> None:
        self._client, self._dialect, self.features = client, dialect, features
        self.requests = 0

    @classmethod
    async def open(
        cls, url: str, probe: Prompt, *, key: str = "", name: str = "", extra: Mapping[str, Any] | None = None
    ) -> Server:
        """Connect to a server and detect its dialect and features.

        Args:
            url: address of the server, with or without `/v1`.
            probe: prompt for test requests.
            key: API key; empty: none.
            name: name of the model in requests; empty: the first model in `/v1/models`.
            extra: further fields of every OpenAI request.

        Raises:
            ValueError: no server answers, or its answers cannot be tested.
        """
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"URL {url!r} is not an address: give http://HOST:PORT.")

        client = SglangClient(url, timeout=600, key=key)
        try:
            server = await cls._sglang(client) if not extra else None
            return server or await cls._openai(client, url, probe, name=name, extra=extra or {})
        except BaseException:
            await client.close()
            raise

    @classmethod
    async def _sglang(cls, client: SglangClient) -> Server | None:
        """Return an SGLang server that answers `/server_info`, or None."""
        try:
            info = await client.read("/server_info")
        except ServerUnreachable as error:
            raise ValueError(f"{error}: start the server, or check the address.") from None
        except (ServerError, ValueError):
            return None
        if not isinstance(info, dict) or "speculative_algorithm" not in info:
            return None

        drafts = bool(info["speculative_algorithm"])
        features = Features(
            dialect="SGLang /generate",
            ids_in=True,
            ids_out=True,
            logprobs=True,
            copies=True,
            ignore_eos=True,
            drafts=drafts,
            gamma=int(info.get("speculative_num_steps") or 0) if drafts else 0,
            mode=_mode(info) if drafts else "",
            dtype=str(info.get("dtype") or "").removeprefix("torch."),
        )
        return cls(client, Generate(features=features), features)

    @classmethod
    async def _openai(
        cls, client: SglangClient, url: str, probe: Prompt, *, name: str, extra: Mapping[str, Any]
    ) -> Server:
        """Return a server that uses OpenAI's dialect, with the features that are visible in its answers."""
        model = name or await _first_model(client)

        # Try completions first: they accept ids, or a text without a chat template.
        for chat in (False, True):
            dialect = OpenAI(model=model, chat=chat, extra=extra)
            refusal = await _try(client, dialect, probe)
            if not isinstance(refusal, str):
                break
        else:
            raise ValueError(
                f"{url} answers neither /generate nor /v1/completions nor /v1/chat/completions: {refusal}"
            )

        # A server may ignore a field, so a feature counts only if its effect is visible in an answer.
        features = Features(dialect="OpenAI chat" if chat else "OpenAI completions", ids_in=chat)
        requested: set[str] = set()
        for feature in ("ignore_eos", "ids_in", "logprobs", "ids_out"):
            if feature == "ids_in" and chat:  # the ids of the rendered chat template are known
                continue
            tried = OpenAI(model=model, chat=chat, requested=frozenset({*requested, feature}), extra=extra)
            answers = await _try(client, tried, probe)
            if not isinstance(answers, str) and _shows(feature, answers):
                requested.add(feature)
                setattr(features, feature, True)

                # A server whose rows of log-probabilities have ids is llama.cpp's. If told to ignore the end
                # token, it forbids this token, which is another distribution.
                if feature == "logprobs" and all(answer.ids for answer in answers):
                    requested.discard("ignore_eos")
                    features.ignore_eos = False

        # Older versions of vLLM return ids only as token texts.
        dialect = OpenAI(model=model, chat=chat, requested=frozenset(requested), extra=extra)
        if features.logprobs and not features.ids_out:
            older = {**extra, "return_tokens_as_token_ids": True}
            tried = OpenAI(model=model, chat=chat, requested=frozenset(requested), extra=older)
            answers = await _try(client, tried, probe)
            if not isinstance(answers, str) and _shows("ids_out", answers):
                features.ids_out, dialect = True, tried

        # Test whether one request can return several samples (`n`).
        answers = await _try(client, dialect, probe, count=2)
        features.copies = not isinstance(answers, str) and len(answers) == 2
        return cls(client, dialect, features)

    async def sample(
        self, prompt: Prompt, *, count: int, temperature: float, tokens: int, copies: int = _COPIES
    ) -> list[Answer]:
        """Return `count` independent samples. Raises ServerError or ServerUnreachable."""
        # vLLM rejects a request for several greedy samples.
        size = copies if self.features.copies and temperature else 1
        sizes = [size] * (count // size) + [count % size] * (count % size > 0)
        capacity = asyncio.Semaphore(max(1, AT_ONCE // size) if size > 1 else AT_ONCE)

        async def sample(some: int) -> list[Answer]:
            async with capacity:
                self.requests += 1
                body = self._dialect.body(prompt, count=some, temperature=temperature, tokens=tokens)

                # Whether an answer is lost does not depend on its tokens, so a retry keeps the distribution.
                answers = self._dialect.read(await self._client.read(self._dialect.path, body))
                if len(answers) != some:
                    raise ServerError(f"{self._dialect.path} gave {len(answers)} of {some} samples.")
                return answers

        return [answer for answers in await asyncio.gather(*map(sample, sizes)) for answer in answers]

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


async def _try(
    client: SglangClient, dialect: OpenAI, probe: Prompt, count: int = 1
) -> Sequence[Answer] | str:
    """Request answers of two tokens; return them, or the error message of the server."""
    try:
        body = dialect.body(probe, count=count, temperature=1.0, tokens=2)
        return dialect.read(await client.post(dialect.path, body))
    except (ServerError, ServerUnreachable) as error:
        return str(error)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"{dialect.path} gave an answer of another form: {error!r}"


def _shows(feature: str, answers: Sequence[Answer]) -> bool:
    """Return whether the requested feature is visible in the answers."""
    if feature == "logprobs":
        return all(answer.logprobs for answer in answers)
    if feature == "ids_out":
        return all(answer.ids for answer in answers)
    return bool(answers)  # visible only in that the server accepted the request


async def _first_model(client: SglangClient) -> str:
    try:
        return str((await client.read("/v1/models"))["data"][0]["id"])
    except ServerUnreachable as error:
        raise ValueError(f"{error}: start the server, or check the address.") from None
    except (ServerError, KeyError, IndexError, TypeError, ValueError):
        raise ValueError("/v1/models lists no model: give --name, the model of requests.") from None


def served_dtype(reported: str, stored: str) -> str:
    """Return the dtype of a server's weights. reported: the server's dtype. stored: the checkpoint's dtype.

    SGLang's "auto" converts float32 to float16 (sglang/srt/configs/model_config.py).

    >>> served_dtype("auto", "float32"), served_dtype("auto", "bfloat16"), served_dtype("", "float32")
    ('float16', 'bfloat16', 'float32')
    """
    if reported == "auto":
        return "float16" if stored == "float32" else stored
    return reported or stored


def _mode(info: Mapping[str, Any]) -> str:
    """Return the `spec.mode` that corresponds to a server's flags; "tree" if it drafts trees."""
    if int(info.get("speculative_eagle_topk") or 1) > 1:
        return "tree"
    if info.get("speculative_use_block_verification"):
        return "block"
    return "rejection" if info.get("speculative_use_rejection_sampling") else "target_only"
