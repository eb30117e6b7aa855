"""Horovod on some of the ranks that MPI started: ``hvd.init`` may be given them, and others begin one of their own."""

import sys
from typing import Any

from otel_dltrace.model.topology import World

_MPI = ("openmpi", "mpich", "slurm", "pmix")


def is_part(world: World, ops: Any) -> bool:
    """Return whether Horovod, by its module *ops*, has fewer ranks than the launcher's *world*."""
    return world.launcher in _MPI and ops.size() < world.world_size


def first_of(comm: Any, world: World, ops: Any) -> int:
    """Return which of the ranks of *world* is Horovod's rank 0, given what ``hvd.init`` was given as *comm*."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(comm, mpi.Comm):
        (first,) = mpi.Group.Translate_ranks(comm.Get_group(), [0], mpi.COMM_WORLD.Get_group())
        return int(first)
    if comm is not None and len(comm):
        return int(comm[0])
    return world.rank - ops.rank() if is_part(world, ops) else 0
