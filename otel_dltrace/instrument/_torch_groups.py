"""What a process group of PyTorch says of itself: number, backend, membership."""

import sys
from typing import Any

from otel_dltrace.instrument._sites import Args, Kwargs, Row, Site

C10D = "torch.distributed.distributed_c10d"
HOST_BACKENDS = ("gloo", "mpi")
"""Backends whose works end when the work is done; the others' (NCCL) say when it was enqueued."""
_MONITORED = 2
"""By how much a monitored barrier advances the number on every rank but the first."""


def c10d() -> Any:
    """Return ``torch.distributed.distributed_c10d``, which the program has loaded."""
    return sys.modules[C10D]


def group_of(group: Any) -> Any:
    """Return the process group that *group* means in a call: itself, by its name, or None for the world's.

    None where there is none; that is for the call itself to refuse.
    """
    module = c10d()
    if group is None:
        return module.GroupMember.WORLD
    if isinstance(group, str):
        try:
            return module._resolve_process_group(group)
        except RuntimeError:
            return None
    return group if isinstance(group, module.ProcessGroup) else None


def is_outside(group: Any) -> bool:
    """Return whether this rank is outside of *group*, as a call gives it: calls do nothing there."""
    return bool(group == c10d().GroupMember.NON_GROUP_MEMBER)


def backend_of(group: Any, device: Any) -> str:
    """Return the backend that *group* uses for tensors on *device* (None: its own one)."""
    if device is None:
        return str(c10d().get_backend(group))
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError:  # no backend for this device: the call itself will say so
        return str(group.name()).lower()


# -- the number of a collective ---------------------------------------------------------------------

_sent: dict[Any, int] = {}
"""By group: by how much this rank's point-to-point calls have advanced its number."""


def sequence_number(group: Any) -> int:
    """Return the number of the last collective of *group*, the same on all its ranks; 0 if not counted.

    Gloo counts a rank's sends and receives as well, of which each rank has its own; not so here,
    nor in PyTorch's Flight Recorder.
    """
    number = _backend_number(group)
    return number - _sent.get(group, 0) if _sent else number


def forget(group: Any = None) -> None:
    """Forget what *group* (default: every group) has sent: it is being destroyed."""
    if group is None:
        _sent.clear()
    else:
        _sent.pop(group, None)


def _backend_number(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # MPI does not count
        return 0


def _count_begins(args: Args, _kwargs: Kwargs) -> tuple[Any, int]:
    return args[0], _backend_number(args[0])


def _counted(span: tuple[Any, int], _result: object) -> None:
    group, before = span
    if advance := _backend_number(group) - before:
        _sent[group] = _sent.get(group, 0) + advance


def _count_named_begins(args: Args, kwargs: Kwargs) -> tuple[Any, int]:
    group = group_of(args[-1] if args else kwargs["group_name"])
    return group, _backend_number(group)


def _monitored(span: tuple[Any, int], _result: object) -> None:
    # It is made of sends and receives, most of them on the first rank.
    group, before = span
    if (advance := _backend_number(group) - before) > _MONITORED:
        _sent[group] = _sent.get(group, 0) + advance - _MONITORED


COUNT_NAMED = Site("", "point to point", begin=_count_named_begins, finish=_counted)
"""The same for an operator, whose last argument is the group's name."""
COUNTS: tuple[Row, ...] = (
    *(
        Site(C10D, f"ProcessGroup.{name}", begin=_count_begins, finish=_counted)
        for name in ("send", "recv", "recv_anysource")
    ),
    Site(C10D, "ProcessGroup.monitored_barrier", begin=_count_begins, finish=_monitored),
)
"""What has to be seen at every level, so that all ranks agree on the number of a collective."""
