"""What a process group of PyTorch says of itself: number, backend, membership."""

import sys
from typing import Any

C10D = "torch.distributed.distributed_c10d"
HOST_BACKENDS = ("gloo", "mpi")
"""Backends whose works end when the work is done; the others' (NCCL) say when it was enqueued."""


def c10d() -> Any:
    """Return ``torch.distributed.distributed_c10d``, which the program has loaded."""
    return sys.modules[C10D]


def member_of(group: Any) -> Any:
    """Return the process group that *group* means in a call (None: the world's).

    None where there is none, or where this rank is outside: calls do nothing there.
    """
    module = c10d()
    if group is None:
        group = module.GroupMember.WORLD
    return group if isinstance(group, module.ProcessGroup) else None


def sequence_number(group: Any) -> int:
    """Return the number of the last collective of *group*, the same on all its ranks; 0 if not counted."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # MPI does not count
        return 0


def backend_of(group: Any, device: Any) -> str:
    """Return the backend that *group* uses for tensors on *device* (None: its own one)."""
    if device is None:
        return str(c10d().get_backend(group))
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError:  # no backend for this device: the call itself will say so
        return str(group.name()).lower()
