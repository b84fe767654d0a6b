"""Token classes: where a tool call, code and prose begin and end."""

import pytest

from rlpipe.diagnosis.token_class import sampled_spans, text_classes, token_classes

pytestmark = pytest.mark.unit
LETTERS = {"tool_call": "T", "code": "C", "prose": "p"}


def painted(text, **options):
    return "".join(LETTERS[kind] for kind in text_classes(text, **options))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", "ppppp"),
        ("a```py\nx```b", "p" + "C" * 10 + "p"),
        ("a```bash\nls\n```b", "p" + "T" * 14 + "p"),
        ("a```bash\nls", "p" + "T" * 10),
        ("<tool_call>{}</tool_call>", "T" * 25),
        ("```py\nx", "C" * 7),
        ("hi<|end|>", "p" * 9),
    ],
)
def test_a_text_is_painted_by_its_marks(text, expected):
    assert painted(text) == expected


def test_a_here_document_inside_a_command_is_code():
    text = "cat > f <<'EOF'\nx = 1\nEOF\nls"
    assert painted(text, plain_commands=True) == "T" * 16 + "C" * 6 + "T" * 6


def test_the_token_that_ends_a_plain_command_is_prose():
    assert painted("ls<|end|>", plain_commands=True) == "TT" + "p" * 7


def test_tokens_take_the_class_of_their_first_character_and_context_has_none():
    record = {
        "tokens": [1, 2, 3, 4, 5, 6],
        "token_texts": ["user", "so ", "```bash\nls", "\n```", " ok", "tool"],
        "policy_versions": [[-1, 1], [0, 2], [1, 2], [-1, 1]],
    }
    assert sampled_spans(record) == [(1, 5)]
    assert token_classes(record) == [None, "prose", "tool_call", "tool_call", "prose", None]


def test_without_texts_nothing_is_known():
    record = {"tokens": [1, 2], "token_texts": None, "policy_versions": [[-1, 1], [0, 1]]}
    assert token_classes(record) == [None, None]
