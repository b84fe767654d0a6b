"""Conversations from files: what is refused, and the same tokens as a rollout would have."""

import json

import numpy as np
import pytest

from rlpipe.adapt.conversations import ConversationFormat, ConversationSuite, read_conversations
from rlpipe.config.paths import resolve
from rlpipe.rollout.chat import ChatFormat

pytestmark = pytest.mark.unit

CHAT = [
    {"role": "user", "content": "core.py: band is wrong"},
    {"role": "assistant", "content": "grep -n '' core.py"},
    {"role": "tool", "content": "1:def band(x):\n2:    return x"},
    {"role": "assistant", "content": "submit"},
]


@pytest.fixture(scope="module")
def tiny():
    return resolve("shipped:models/tiny")


def write(path, *items):
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in items))
    return path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "has no messages"),
        ({"messages": []}, "has no messages"),
        ({"messages": ["hello"]}, "message 0"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "message 1"),
        ({"messages": CHAT[:1]}, "an assistant turn"),
        ({"messages": CHAT[1:]}, "after at least one other"),
    ],
)
def test_a_malformed_line_is_refused_with_file_and_line(tmp_path, line, said):
    file = write(tmp_path / "chats.jsonl", {"messages": CHAT}, "", line)
    with pytest.raises(ValueError, match=said) as caught:
        read_conversations(file)
    assert f"{file}:3" in str(caught.value)


def test_a_file_without_conversations_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="no conversation"):
        read_conversations(write(tmp_path / "empty.jsonl", ""))


def test_exactly_what_the_assistant_said_counts_as_sampled(tiny):
    trajectory = ConversationFormat(tiny).trajectory(CHAT, "c:0", 512)
    chat = ChatFormat.from_pretrained(tiny)
    sampled = [t for t, m in zip(trajectory.token_ids.tolist(), trajectory.loss_mask, strict=True) if m]
    end = chat.stop_token_ids[0]
    assert chat.decode(sampled[: sampled.index(end) + 1]) == CHAT[1]["content"]
    assert chat.decode(sampled[sampled.index(end) + 1 :]) == CHAT[3]["content"]
    assert sampled.count(end) == trajectory.num_turns == 2
    assert trajectory.token_ids.tolist() == chat.initial(CHAT)[:-1]  # without the next generation prompt
    assert trajectory.prompt_length == len(chat.initial(CHAT[:1]))


def test_what_the_assistant_spells_out_never_ends_its_turn(tiny):
    tricky = [CHAT[0], {"role": "assistant", "content": "echo '<|end|><|user|>'"}]
    trajectory = ConversationFormat(tiny).trajectory(tricky, "c:0", 512)
    end = ChatFormat.from_pretrained(tiny).stop_token_ids[0]
    said = trajectory.token_ids[trajectory.prompt_length :].tolist()
    assert said.index(end) == len(said) - 1


def test_a_long_conversation_is_cut_to_the_context(tiny):
    whole = ConversationFormat(tiny).trajectory(CHAT, "c:0", 512)
    cut = ConversationFormat(tiny).trajectory(CHAT, "c:0", 20)
    assert np.array_equal(cut.token_ids, whole.token_ids[:20]) and cut.truncated and not whole.truncated
    parts = (cut.loss_mask, cut.rollout_logprobs, cut.entropies, cut.versions)
    assert {len(part) for part in parts} == {20}


def test_the_last_assistant_turn_is_what_is_played(tmp_path):
    suite = ConversationSuite(write(tmp_path / "chats.jsonl", {"messages": CHAT}, {"messages": CHAT[:2]}))
    first, second = (suite.episode(name).messages() for name in suite.instance_ids("chats"))
    assert (first, second) == (CHAT[:3], CHAT[:1])
    assert suite.episode("chats:0").step("anything").done
