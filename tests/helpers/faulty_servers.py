"""A small server over a known distribution that drafts as SGLang does, with one fault or none.

The next token depends on the two before it. The first token of an answer comes from the prompt's row, as
after a prefill; the others from verify steps of `GAMMA` drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlpipe.certify.dialects import Answer, Features, Prompt

VOCAB, GAMMA = 24, 3
PROMPTS = [Prompt(text=f"{a} {b}", ids=[a, b]) for a, b in ((1, 2), (3, 7), (11, 5), (20, 13))]


@dataclass
class MarkovModel:
    """The reference: logits by the two tokens before, [V, V, V]. rounds: the server is bfloat16."""

    table: np.ndarray
    rounds: bool = False
    vocabulary: int = VOCAB

    @classmethod
    def random(cls, seed: int = 0, *, scale: float = 1.6, ties: bool = False) -> MarkovModel:
        """ties: in a third of the rows the best two logits differ by less than bfloat16 tells apart."""
        rng = np.random.default_rng(seed)
        table = scale * rng.standard_normal((VOCAB, VOCAB, VOCAB))
        if ties:
            rows = table.reshape(-1, VOCAB)
            best = rows.argsort(1)[:, -2:]
            some = np.flatnonzero(rng.random(len(rows)) < 1 / 3)
            rows[some, best[some, 0]] = rows[some, best[some, 1]] - 0.002
        return cls(table.astype(np.float32), rounds=ties)

    def served(self) -> np.ndarray:
        """The table as the server computes it."""
        return as_bfloat16(self.table) if self.rounds else self.table

    def logits(self, ids: np.ndarray, keep: int, *, rounded: bool = False) -> np.ndarray:
        table = self.served() if rounded else self.table
        ends = range(ids.shape[1] - keep, ids.shape[1])
        return np.stack([table[ids[:, end - 1], ids[:, end]] for end in ends], 1)


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to the 8 significant bits of bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@dataclass
class FaultyServer:
    """fault: "" for a right server, or a name of FAULTS. seed: of its samples."""

    model: MarkovModel
    fault: str = ""
    seed: int = 0
    features: Features = field(default_factory=lambda: features())

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        noise = np.random.default_rng(77).standard_normal(self.model.table.shape)
        # As drafts of real models, it is less certain than the model.
        distance = 2.0 if self.fault == "stale draft" else 0.4
        self.draft = 0.7 * self.model.served() + distance * noise

    async def sample(self, prompt: Prompt, *, count: int, temperature: float, tokens: int) -> list[Answer]:
        """Continuations of a prompt, by speculative decoding."""
        out = np.zeros((count, 2 + tokens + GAMMA + 1), np.int64)
        out[:, :2] = prompt.ids
        out[:, 2] = self._draw(self._p(out[:, 0], out[:, 1], temperature))
        length = np.full(count, 3)
        accepted, steps = np.zeros(count, int), np.zeros(count, int)
        while (running := np.flatnonzero(length < 2 + tokens)).size:
            taken = self._step(out, running, length[running], temperature)
            accepted[running] += taken
            steps[running] += 1
            length[running] += taken + 1
        out = out[:, : 2 + tokens]
        logprobs = self._logprobs(out, temperature)
        return [
            Answer(ids=row[2:].tolist(), logprobs=logs.tolist(), accepted=int(a), verify_steps=int(s))
            for row, logs, a, s in zip(out, logprobs, accepted, steps, strict=True)
        ]

    def _step(self, out: np.ndarray, rows: np.ndarray, length: np.ndarray, temperature: float) -> np.ndarray:
        """Append accepted drafts and one more token to rows; returns how many drafts were accepted."""
        drafts, q = [], []
        for depth in range(GAMMA):
            a, b = out[rows, length + depth - 2], out[rows, length + depth - 1]
            q.append(self._q(a, b, temperature))
            drafts.append(self._draw(q[-1]))
            out[rows, length + depth] = drafts[-1]

        taken, alive, final = np.zeros(len(rows), int), np.ones(len(rows), bool), np.zeros(len(rows), int)
        index = np.arange(len(rows))
        for depth in range(GAMMA):
            a, b = out[rows, length + depth - 2], out[rows, length + depth - 1]
            p, judged = self._p(a, b, temperature), q[depth]
            if self.fault == "wrong q":
                judged = judged**1.5 / (judged**1.5).sum(1, keepdims=True)
            ratio = p[index, drafts[depth]] / judged[index, drafts[depth]]
            if temperature == 0:
                ratio = (p[index, drafts[depth]] == 1).astype(float)
            accept = alive & (self.rng.random(len(rows)) < ratio)
            residual = np.maximum(p - judged, 0)
            residual = np.where(residual.sum(1, keepdims=True) > 1e-12, residual, p)
            other = self._draw(residual / residual.sum(1, keepdims=True))
            final = np.where(alive & ~accept, other, final)
            alive, taken = accept, taken + accept
        a, b = out[rows, length + GAMMA - 2], out[rows, length + GAMMA - 1]
        law = self._q if self.fault == "bonus from the draft" else self._p
        final = np.where(alive, self._draw(law(a, b, temperature)), final)
        out[rows, length + taken] = final
        return taken

    def _p(self, a: np.ndarray, b: np.ndarray, temperature: float) -> np.ndarray:
        probs = softmax(self.model.served()[a, b], self._applied(temperature))
        order = np.argsort(-probs, 1)
        ranked = np.take_along_axis(probs, order, 1)
        if self.fault == "top-p left on":
            ranked = np.where(ranked.cumsum(1) - ranked < 0.95, ranked, 0)
        elif self.fault == "top-k left on":
            ranked[:, 10:] = 0
        elif self.fault == "all cuts left on":  # llama.cpp's defaults, before temperature
            plain = np.take_along_axis(softmax(self.model.served()[a, b], 1.0), order, 1)
            kept = (plain.cumsum(1) - plain < 0.95) & (plain >= 0.05 * plain[:, :1])
            ranked = np.where(kept, ranked, 0)
        elif self.fault == "second best at temperature 0" and temperature == 0:
            wrong = self.rng.random(len(ranked)) < 0.05
            ranked[wrong] = np.roll(ranked[wrong], 1, 1)
        np.put_along_axis(probs, order, ranked / ranked.sum(1, keepdims=True), 1)
        return probs

    def _q(self, a: np.ndarray, b: np.ndarray, temperature: float) -> np.ndarray:
        return softmax(self.draft[a, b], self._applied(temperature))

    def _applied(self, temperature: float) -> float:
        changed = {"temperature applied twice": temperature**2, "temperature not applied": 1.0}
        if self.fault == "no sampling":
            return 0.0
        return changed.get(self.fault, temperature) if temperature else 0.0

    def _draw(self, law: np.ndarray) -> np.ndarray:
        beyond = self.rng.random((len(law), 1)) * law.sum(1, keepdims=True) >= law.cumsum(1)
        return np.minimum(beyond.sum(1), VOCAB - 1)

    def _logprobs(self, out: np.ndarray, temperature: float) -> np.ndarray:
        at = self._applied(temperature) or 1.0
        if self.fault == "log-probabilities before temperature":
            at = 1.0
        steps = range(2, out.shape[1])
        table = self.model.served()
        probs = [softmax(table[out[:, t - 2], out[:, t - 1]], at) for t in steps]
        sampled = [p[np.arange(len(out)), out[:, t]] for p, t in zip(probs, steps, strict=True)]
        return np.log(np.stack(sampled, 1))


def features(**changes: object) -> Features:
    """Those of a server that offers all."""
    every = {"ids_in": True, "ids_out": True, "logprobs": True, "copies": True, "drafts": True}
    return Features(**({"dialect": "in process", "gamma": GAMMA, "mode": "rejection", **every} | changes))


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """[n, V]; temperature 0: all on the first of the largest."""
    if temperature == 0:
        return np.eye(VOCAB)[logits.argmax(1)]
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max(1, keepdims=True))
    return probs / probs.sum(1, keepdims=True)


async def own_draft_counts(model: MarkovModel, answers: int, tokens: int, seed: int) -> list[np.ndarray]:
    """Accepted drafts and verify steps of a right server with the draft that belongs to the model."""
    server = FaultyServer(model, seed=seed)
    counts = []
    for prompt in PROMPTS:
        some = await server.sample(prompt, count=answers, temperature=1.0, tokens=tokens)
        counts.append(np.array([[one.accepted, one.verify_steps] for one in some]))
    return counts


def own_draft_of(model: MarkovModel, seed: int):
    """A function for `collect` that gives those counts."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    def count(prompts: Sequence[Prompt], features: Features, answers: int, tokens: int) -> list[np.ndarray]:
        with ThreadPoolExecutor(1) as pool:  # a loop of its own: the caller's is running
            return pool.submit(asyncio.run, own_draft_counts(model, answers, tokens, seed)).result()

    return count


FAULTS = {  # fault: what the certificate must name it, and the line about it
    "wrong q": ("verification", "later tokens"),
    "bonus from the draft": ("bonus token", "later tokens"),
    "temperature applied twice": ("temperature", "temperature"),
    "temperature not applied": ("temperature", "temperature"),
    "stale draft": ("stale draft", "acceptance"),
    "top-p left on": ("truncated", "unlikely tokens"),
    "top-k left on": ("truncated", "unlikely tokens"),
    "all cuts left on": ("truncated", "unlikely tokens"),
    "log-probabilities before temperature": ("log-probabilities before temperature", "log-probabilities"),
    "second best at temperature 0": ("greedy", "greedy"),
    "no sampling": ("no sampling", "first tokens"),
}
