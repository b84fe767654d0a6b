"""Which attempts keep their verify steps, and where those stand in the trajectory."""

import asyncio

import pytest

from rlpipe.config.env import EnvConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.envs.base import StepResult
from rlpipe.metrics.rollouts import accepted_depths
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.collector import Collector
from rlpipe.types import DraftStep, FinishReason, GenerateResult, Prompt, SpecCounts

pytestmark = pytest.mark.unit
TURN = [50, 51, 52, 53]


class Engine:
    """Every turn is TURN: the first token by the prefill, 51 and 52 as drafts, 53 by the target."""

    async def generate(self, request):
        step = DraftStep(
            position=1,
            tokens=[51, 52, 9],
            target_probs=[0.9, 0.9, 0.1],
            draft_probs=[0.8, 0.9, 0.5],
            num_accepted=2,
        )
        return GenerateResult(
            request_id=request.request_id,
            output_ids=list(TURN),
            logprobs=[-0.1] * 4,
            entropies=[0.2] * 4,
            versions=[0] * 4,
            finish_reason=FinishReason.STOP,
            spec=SpecCounts(drafted=[1, 1, 1], accepted=[1, 1, 0], verify_steps=1, proposed=3),
            drafts=[step] if request.sampling.record_drafts else None,
        )

    def abort(self, request_ids=None):
        """Nothing runs."""

    def end_session(self, session_id):
        """Nothing is kept."""


class Suite:
    max_turns = 2

    def episode(self, instance_id):
        return self

    def messages(self):
        return [{"role": "user", "content": "hi"}]

    def step(self, action):
        return StepResult(observation="ok")

    def finish(self):
        return StepResult(done=True, reward=1.0)

    def close(self):
        """Nothing to free."""


class Chat:
    stop_token_ids = (53,)

    def initial(self, messages, tools=None):
        return [1, 2, 3]

    def continuation(self, messages, turn_ids):
        return [4, 5]

    def observation(self, text):
        return [{"role": "tool", "content": text}]

    def decode(self, ids):
        return "x"

    def token_texts(self, ids):
        return [f"<{i}>" for i in ids]


@pytest.mark.parametrize("record", [True, False])
def test_the_first_attempt_of_a_group_keeps_its_verify_steps_if_asked(record):
    async def play():
        collector = Collector(
            engine=Engine(),
            suite=Suite(),
            chat=Chat(),
            rollout=RolloutConfig(),
            env=EnvConfig(),
            record_drafts=record,
        )
        try:
            return await collector.collect(Prompt(instance_id="i", group_id="g"), 3)
        finally:
            await collector.close()

    first, *others = asyncio.run(play()).trajectories
    assert all(t.drafts is None and "token_texts" not in t.info for t in others)
    if not record:
        assert first.drafts is None
        return
    assert first.token_ids.tolist() == [1, 2, 3, *TURN, 4, 5, *TURN]
    assert [step.position for step in first.drafts] == [4, 10]
    assert all(first.token_ids[step.position] == step.tokens[0] for step in first.drafts)
    assert accepted_depths(first.loss_mask.tolist(), first.drafts) == [
        -1,
        -1,
        -1,
        0,
        1,
        2,
        0,
        -1,
        -1,
        0,
        1,
        2,
        0,
    ]
    assert first.info["token_texts"][:4] == ["<1>", "<2>", "<3>", "<50>"]


def test_pieces_of_the_shipped_tokenizer_join_to_its_text():
    from rlpipe.config.paths import resolve

    chat = ChatFormat.from_pretrained(resolve("shipped:models/tiny"))
    ids = chat.initial([{"role": "user", "content": "fix the function"}])
    assert "fix the function" in "".join(chat.token_texts(ids))
    assert chat.token_texts(ids) == chat.token_texts(ids)
