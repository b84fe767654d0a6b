"""SGLang as a rollout engine: a server in a separate environment, driven over HTTP.

Nothing here imports sglang; `SglangEngine` implements `rlpipe.rollout.engine.Engine`.

    arguments.py  settings -> command line, environment, and the values that the server must report
    wire.py       server-sent events on reused connections
    batches.py    turns that are sent in one request
    target.py     the directory that a server loads, if it is not the checkpoint's
    environment.py  the interpreter, and a check of its package versions
    server.py     the process: start, wait, stop together with its children
    client.py     HTTP: errors, retries
    answers.py    requests in SGLang's format, and answers as `GenerateResult`
    turns.py      requests in flight, their stop tokens and counters
    replica.py    keeps a server alive: watches it, replaces it with one on the newest weights
    updates.py    brings a new version of the weights to that server, and reacts to a failed check
    engine.py     combines all of these

Transports of weights, and the check that they arrived, are in `rlpipe.weights`.
"""

from rlpipe.rollout.sglang.engine import SglangEngine, check_launch

__all__ = ["SglangEngine", "check_launch"]
