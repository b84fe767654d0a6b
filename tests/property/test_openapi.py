"""The endpoint's OpenAPI document, and what the endpoint does, held against each other by schemathesis."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlpipe.config.env import ToolParser
from rlpipe.rollout.chat import ChatFormat
from rlpipe.serve import openapi
from rlpipe.serve.server import AgentServer
from tests.helpers.agents import Sampler, assert_recorded, attempt_at, templates, tokenizer_for

pytestmark = pytest.mark.property
# What no schema can say is refused by 400 too: a conversation that ends with the model's own turn, or that
# the template does not take.
SETTINGS = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400"]
"""


@contextmanager
def served():
    """The session of an attempt, served from another thread; what it recorded is checked at the end."""
    tokenizer = tokenizer_for(templates()["qwen2_5"])
    chat = ChatFormat(tokenizer)
    sampler, endpoint = Sampler(chat, len(tokenizer)), AgentServer("127.0.0.1", ToolParser.HERMES)
    attempt = attempt_at(chat, sampler, max_turns=1 << 20)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    session = wait(endpoint.open(attempt))
    try:
        yield session
    finally:
        wait(session.close())
        wait(endpoint.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert_recorded(attempt.trajectory, sampler.sampled)


def schemathesis(session, folder: Path, *options: str):
    """Run schemathesis against a session: (exit status, what it wrote, statuses by operation)."""
    (folder / "schemathesis.toml").write_text(SETTINGS)
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            "run",
            f"{session.address.root_url}/openapi.json",
            f"--header=Authorization: Bearer {session.address.api_key}",
            "--seed=1",
            "--generation-database=none",
            "--report=har",
            "--report-har-path=requests.har",
            "--no-color",
            *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    statuses = Counter()
    for entry in json.loads((folder / "requests.har").read_text())["log"]["entries"]:
        path = entry["request"]["url"].removeprefix(session.address.root_url)
        statuses[path, entry["response"]["status"]] += 1
    return done.returncode, done.stdout, statuses


def test_every_generated_request_has_an_answer_that_the_document_describes(tmp_path):
    with served() as session:
        status, written, statuses = schemathesis(session, tmp_path, "--max-examples=20")

    assert status == 0, written[-5000:]
    for path in openapi.document()["paths"]:
        assert statuses[path, 200], statuses
    assert not [at for at in statuses if at[1] >= 500]


def test_a_document_that_promises_too_much_is_found(tmp_path, monkeypatch):
    document = openapi.document()
    document["components"]["schemas"]["ChatRequest"]["properties"]["n"]["maximum"] = 1
    monkeypatch.setattr(openapi, "document", lambda: document)
    with served() as session:
        status, written, _ = schemathesis(
            session, tmp_path, "--phases=coverage", "--include-path=/v1/chat/completions"
        )

    assert status == 1 and "Schema-violating request accepted" in written, written[-3000:]
