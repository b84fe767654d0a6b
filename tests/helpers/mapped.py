"""A server that maps the weights it is given, by the module that runs inside a real one."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import threading
from base64 import b64decode
from pathlib import Path

from rlpipe.weights.protocols import ServerError
from rlpipe.weights.shared_memory import LOADER, SERVED

_module, _function = LOADER.split(".")
_spec = importlib.util.spec_from_file_location(_module, SERVED / f"{_module}.py")
served = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(served)
_one_server = threading.Lock()  # the module belongs to a process of one server, which loads in one thread


def open_files():
    """Buckets that this process has open."""
    found = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(file.readlink()))
        except FileNotFoundError:  # the listing's own
            continue
    return [link for link in found if "rlpipe-weights" in link]


class Server:
    """Loads as SGLang does, after the next bucket had the time to be laid; `fails` at one request."""

    def __init__(self, fails=-1):
        self.asked, self.weights, self.fails = [], {}, fails

    async def post(self, path, body, timeout=None):
        self.asked.append((path, body.get("weight_version"), body.get("load_format")))
        if path != "/update_weights_from_tensor":
            return
        if len(self.asked) == self.fails:
            raise ServerError("refused")
        await asyncio.to_thread(self._load, body)

    def _load(self, body):
        with _one_server:
            for serialized in body["serialized_named_tensors"]:
                served.load(self, pickle.loads(b64decode(serialized)))

    def load_weights(self, pairs):
        self.weights |= {name: tensor.clone() for name, tensor in pairs}
