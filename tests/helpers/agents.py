"""Sessions of agents without an engine: a sampler that remembers, and what must hold afterwards."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlpipe.config.env import ToolParser
from rlpipe.envs.base import AgentAddress
from rlpipe.rollout.agents import AgentAttempt
from rlpipe.rollout.chat import ChatFormat
from rlpipe.serve.session import Session
from rlpipe.types import FinishReason, GenerateResult, SpecCounts, Trajectory

TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a page.",
        "parameters": {
            "type": "object",
            "properties": {"page": {"type": "string", "description": "its name"}},
        },
    },
}
CALL = '<tool_call>{"name":  "read", "arguments": {"page": "a"}}</tool_call>'
_CORPUS = [
    "the user said: hello there, and the assistant answered",
    "tool result ok error",
    CALL,
    "<think>\n\n</think>",
]
# Whatever a template may mean as one token.
_SPECIAL = re.compile(
    r"<[|｜][^|｜<>{}' ]{1,40}[|｜]>|</?(?:start|end)_of_(?:turn|text|image)>|\[/?[A-Z_]{3,20}\]"
)


def templates() -> dict[str, str]:
    """Chat templates of published models, by name: those that TRL's wheel ships, unchanged."""
    folder = Path(find_spec("trl").origin).parent / "chat_templates"
    return {
        file.stem: file.read_text() for file in sorted(folder.glob("*.jinja")) if "_training" not in file.stem
    }


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges, in which what the template writes in brackets is one token."""
    special = sorted({"<bos>", "<eos>", *_SPECIAL.findall(template)})
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        _CORPUS * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>", chat_template=template
    )


class Sampler:
    """Generates as an engine does: random ids and logprobs, or the texts it is told to write.

    sampled: (turn, result) of every turn that was returned. texts: what to write next; None: anything.
    """

    def __init__(self, chat: ChatFormat, vocab: int, seed: int = 0) -> None:
        self._chat, self._vocab, self._random = chat, vocab, Random(seed)
        self._special = {
            token for token in range(vocab) if self._chat.token_texts([token])[0].startswith("<")
        }
        self.sampled, self.texts, self.hold = [], [], None
        self.version = 3

    async def __call__(self, turn) -> GenerateResult:
        if self.hold is not None:
            await self.hold.wait()
        result = self.result(turn)
        self.sampled.append((turn, result))
        return result

    def result(self, turn) -> GenerateResult:
        """What it samples for a turn."""
        text = self.texts.pop(0) if self.texts else None
        if text is None:
            ids = [self._random.randrange(self._vocab) for _ in range(self._random.randrange(1, 12))]
            ids = [token for token in ids if token not in self._special]
        else:
            ids = self._chat.encode(text)
        ids = [*ids, self._chat.stop_token_ids[0]]
        cut = len(ids) > turn.budget or (text is None and self._random.random() < 0.2)
        ids = (ids[:-1] or ids)[: turn.budget] if cut else ids
        n = len(ids)
        return GenerateResult(
            request_id="r",
            output_ids=ids,
            logprobs=[-self._random.random() for _ in ids],
            entropies=np.full(n, 0.5),
            versions=np.full(n, self.version),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            spec=SpecCounts(),
            top_logprobs=[[(token, -0.1), (1, -3.0)] for token in ids] if turn.top_logprobs else None,
        )


def attempt_at(chat: ChatFormat, generate, *, name="t", **limits) -> AgentAttempt:
    """An attempt whose trajectory and session have one name."""
    settings = {"max_turns": 64, "max_context": 4096, "max_new_tokens": 64} | limits
    return AgentAttempt(
        trajectory=Trajectory(trajectory_id=name, group_id="g", instance_id="i"),
        session_id=name,
        chat=chat,
        generate=generate,
        end_session=lambda name: None,
        **settings,
    )


def open_session(chat: ChatFormat, generate, *, parser=ToolParser.HERMES, **limits) -> Session:
    """A session, and nothing around it."""
    attempt = attempt_at(chat, generate, **limits)
    return Session(attempt, parser, AgentAddress(root_url="", api_key="", answer_at=None))


def assert_recorded(trajectory: Trajectory, sampled) -> None:
    """Every sampled turn is in exactly one segment, after its prompt, as the engine returned it."""
    segments = (
        [trajectory.segment(tokens) for tokens in trajectory.segments()] if len(trajectory.token_ids) else []
    )
    for turn, result in sampled:
        start, end = len(turn.prompt), len(turn.prompt) + len(result.output_ids)
        whole = np.concatenate((turn.prompt, result.output_ids))
        found = [
            segment
            for segment in segments
            if np.array_equal(segment.token_ids[:end], whole)
            and segment.loss_mask[start:end].all()
            and np.array_equal(segment.rollout_logprobs[start:end], result.logprobs)
            and np.array_equal(segment.versions[start:end], result.versions)
        ]
        assert len(found) == 1, f"{len(found)} segments hold a turn"
    assert trajectory.response_length == sum(len(result.output_ids) for _, result in sampled)
    unsampled = ~trajectory.loss_mask
    assert not trajectory.rollout_logprobs[unsampled].any() and (trajectory.versions[unsampled] == -1).all()
