"""SGLang as a rollout engine: a server in its own environment, spoken to over HTTP.

Nothing here imports sglang; `SglangEngine` implements `rlpipe.rollout.engine.Engine`.

    arguments.py  settings -> command line, environment, and what the server must report about itself
    wire.py       server-sent events on kept connections
    batches.py    turns that leave in one request
    target.py     the directory that a server loads, where a draft needs outputs of the target's layers
    environment.py  the interpreter, and whether what it holds is what we know
    server.py     the process: start, wait, stop with everything it started
    client.py     HTTP: errors, retries
    answers.py    a request as SGLang reads it, an answer as our `GenerateResult`
    turns.py      requests in flight, their stop tokens and counters
    replica.py    the server kept alive: watched, replaced by one on the newest weights
    updates.py    a new version of the weights into that server, and what a failed check leads to
    engine.py     all of it together

What travels, how, and the check that it arrived are `rlpipe.weights`.
"""

from rlpipe.rollout.sglang.engine import SglangEngine, check_launch

__all__ = ["SglangEngine", "check_launch"]
