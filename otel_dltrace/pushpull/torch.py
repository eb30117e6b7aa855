"""push_pull for torch, with the names of BytePS's plugin: ``import otel_dltrace.pushpull.torch as bps``."""

from otel_dltrace.pushpull.errors import MismatchError, PeerLostError, PushPullError
from otel_dltrace.pushpull.torch_autograd import push_pull
from otel_dltrace.pushpull.torch_broadcast import broadcast_optimizer_state, broadcast_parameters
from otel_dltrace.pushpull.torch_ops import (
    Compression,
    declare,
    init,
    local_rank,
    local_size,
    poll,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    rank,
    shutdown,
    size,
    synchronize,
)
from otel_dltrace.pushpull.torch_optimizer import DistributedOptimizer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "MismatchError",
    "PeerLostError",
    "PushPullError",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "declare",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
