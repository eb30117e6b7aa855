"""What tells one start of MPICH's or Intel MPI's ranks from another, which their variables do not."""

import os
from dataclasses import replace
from pathlib import Path

from otel_dltrace.model.identity import h64
from otel_dltrace.model.topology import MPICH, World, world_from_env
from otel_dltrace.record.process_id import boot_id, pid_namespace

_PROXY = b"hydra_pmi_proxy"
"""What begins the ranks of one start on a host, and no others; programs of the user's may be between it and them."""


def own_world() -> World:
    """Return who the launcher says this process is; where all ranks are on one host, also what started them."""
    world = world_from_env(os.environ)
    if world.launcher != MPICH or world.is_spawned or world.local_world_size != world.world_size:
        return world
    start = _start_of_proxy()
    run = start if world.world_size > 1 else ""
    return replace(world, start=start or world.start, run=world.run or run)


def _start_of_proxy() -> str:
    """Return what no other proxy has, by the processes above this one; "" where there is none."""
    pid = os.getppid()
    while pid > 1:
        try:
            head, _, tail = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
        except OSError:  # it has ended, or may not be seen
            return ""
        fields = tail.split()
        if head.partition(b"(")[2] == _PROXY:
            return format(h64("hydra", boot_id().hex(), pid_namespace(), pid, int(fields[19])), "016x")
        pid = int(fields[1])
    return ""
