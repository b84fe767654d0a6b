"""Messages between the tests and the code under test: the JSON that is written and read without json."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.envs.swe.grader.codec import dumps, loads

pytestmark = pytest.mark.unit
PLAIN = st.none() | st.booleans() | st.integers() | st.text(st.characters())
FORMS = st.recursive(PLAIN, st.lists, max_leaves=20)


@given(FORMS)
def test_what_is_written_is_json_and_is_read_back(form):
    text = dumps(form)
    assert json.loads(text.decode("utf-8", "surrogatepass")) == form == loads(text)


@pytest.mark.parametrize(
    "text",
    [b"", b" 1", b"1 ", b"[1]x", b"[1,]", b"nul", b"\xff", b'"\n"', b"1" * 5000, b"[" * 100000, b"{1:2}"],
)
def test_what_is_no_json_is_refused_as_json_refuses_it(text):
    with pytest.raises((ValueError, RecursionError)):
        loads(text)
