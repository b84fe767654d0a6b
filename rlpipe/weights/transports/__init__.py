"""Transports of weights to a server, by `rollout.sglang.weight_transfer`: a file and a table row each."""

from rlpipe.config.sglang import WeightTransfer
from rlpipe.weights.transports.base import Transport
from rlpipe.weights.transports.broadcast import BroadcastTransport
from rlpipe.weights.transports.disk import DiskTransport
from rlpipe.weights.transports.ipc import IpcTransport
from rlpipe.weights.transports.shared import SharedMemoryTransport

TRANSPORTS: dict[WeightTransfer, type[Transport]] = {
    WeightTransfer.AUTO: SharedMemoryTransport,  # for an engine outside a run; a run chooses at its launch
    WeightTransfer.SHARED: SharedMemoryTransport,
    WeightTransfer.COLLECTIVE: BroadcastTransport,
    WeightTransfer.IPC: IpcTransport,
    WeightTransfer.DISK: DiskTransport,
}
