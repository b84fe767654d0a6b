"""SGLang as a rollout engine: a server in its own environment, spoken to over HTTP.

Nothing here imports sglang; `SglangEngine` implements `rlpipe.rollout.engine.Engine`.

    arguments.py  settings -> command line, environment, and what the server must report about itself
    environment.py  the interpreter, and whether what it holds is what we know
    server.py     the process: start, wait, stop with everything it started
    client.py     HTTP: errors, retries
    answers.py    a request as SGLang reads it, an answer as our `GenerateResult`
    weights.py    tensors as SGLang reads them, in pieces
    collective.py  tensors by broadcast, to all ranks of a server or of all servers at once
    turns.py      requests in flight, their stop tokens and counters
    sync.py       weights into a server, and the check that they arrived
    canary.py     fingerprints of target and draft, ours against the server's
    replica.py    the server kept alive: watched, replaced by one on the newest weights
    engine.py     all of it together
"""

from rlpipe.rollout.sglang.engine import SglangEngine, check_launch

__all__ = ["SglangEngine", "check_launch"]
