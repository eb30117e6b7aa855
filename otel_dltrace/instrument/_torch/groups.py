"""What a process group of PyTorch says of itself: number, backend, membership."""

import sys
from threading import RLock
from typing import Any

from otel_dltrace.instrument._sites import Args, Kwargs, Row, Site
from otel_dltrace.instrument._torch.methods import OF_GROUPS

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


def has_rank_0(group: Any) -> bool:
    """Return whether the world's first rank is in *group*."""
    return 0 in c10d()._world.pg_group_ranks.get(group, ())


def numbers_with_rank_0() -> dict[str, int]:
    """Return the number of the last collective of each group that the world's first rank is in, by its name."""
    groups = [group for group in c10d()._world.pg_group_ranks if isinstance(group, c10d().ProcessGroup)]
    return {group.group_name: sequence_number(group) for group in groups if has_rank_0(group)}


def name_of(group: Any) -> str:
    """Return the name of *group*; "" where it has none, as one that a program has just made by hand."""
    try:
        return str(group.group_name)
    except RuntimeError:
        return ""


def _only_backend(group: Any) -> str:
    """Return the backend of *group*; "" where it may have one for each kind of device."""
    known = c10d()._world.pg_map.get(group)
    own = str(known[0] if known else group.name()).lower()  # programs make groups that the world does not know
    return "" if ":" in own or own == c10d().Backend.UNDEFINED else own


def backend_of(group: Any, device: Any) -> str:
    """Return the backend that *group* uses for tensors on *device* (None: where there are none, nor one is asked)."""
    if device is None:
        own = _only_backend(group)
        if own:
            return own
        # For barriers and objects PyTorch takes the CPU's, then, where there is one.
        device = min(group._device_types, key=lambda one: one.type != "cpu", default=None)
    try:
        return str(group._get_backend(sys.modules["torch"].device(device)).name()).lower()
    except (RuntimeError, TypeError):  # no backend for this device, or none at all: the call itself will say so
        return str(group.name()).lower()


def is_counted(group: Any, backend: str) -> bool:
    """Return whether the number of *group* counts what *backend* does: of several backends it is that of one."""
    return bool(_only_backend(group)) or backend == str(group.name()).lower() or _lone_backend(group) is not None


def _lone_backend(group: Any) -> Any:
    """Return the backend of *group* if it has one alone, and PyTorch no default; else None.

    So it is with ``cpu:gloo`` where a plugin is known, as ``fake`` is once FSDP2 or a checkpoint's module is imported.
    """
    if str(group.name()).lower() != c10d().Backend.UNDEFINED:
        return None
    devices = group._device_types
    return group._get_backend(devices[0]) if len(devices) == 1 else None


# -- the number of a collective ---------------------------------------------------------------------


class _PointToPoint:
    """This rank's point-to-point calls in one group: how many began and ended, and what they advanced its number by."""

    __slots__ = ("advance", "begun", "ended")

    def __init__(self) -> None:
        self.advance = self.begun = self.ended = 0


_messages: dict[Any, _PointToPoint] = {}
_lock = RLock()  # a signal may come while it is held


def sequence_number(group: Any) -> int:
    """Return the number of the last collective of *group*, the same on all its ranks; 0 if that is not certain.

    Gloo counts a rank's sends and receives as well, of which each rank has its own; not so here,
    nor in PyTorch's Flight Recorder. While another thread is in the middle of one nobody knows
    whether it is counted already.
    """
    messages = _messages.get(group) if _messages else None
    if messages is None:
        return _backend_number(group)
    begun = messages.begun
    number = _backend_number(group) - messages.advance
    return number if begun == messages.begun == messages.ended else 0


def forget(group: Any = None) -> None:
    """Forget the messages of *group* (default: of every group): it is being destroyed."""
    if group is None:
        _messages.clear()
    else:
        _messages.pop(group, None)


def _backend_number(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # MPI does not count, nor does a group without a default
        backend = _lone_backend(group)
    return 0 if backend is None else int(backend._get_sequence_number_for_group())


def _message_begins(args: Args, _kwargs: Kwargs) -> tuple[_PointToPoint, Any, int]:
    return _begins(args[0])


def _named_message_begins(args: Args, kwargs: Kwargs) -> tuple[_PointToPoint, Any, int]:
    return _begins(group_of(args[-1] if args else kwargs["group_name"]))


def _begins(group: Any) -> tuple[_PointToPoint, Any, int]:
    with _lock:
        messages = _messages.setdefault(group, _PointToPoint())
        messages.begun += 1
    return messages, group, _backend_number(group)


def _over(span: tuple[_PointToPoint, Any, int], result: object) -> None:
    messages, group, before = span
    # What advances it further is another thread's.
    advance = min(_backend_number(group) - before, len(result) if isinstance(result, list) else 1)
    with _lock:
        messages.advance += advance
        messages.ended += 1


def _barrier_begins(args: Args, _kwargs: Kwargs) -> tuple[Any, int]:
    return args[0], _backend_number(args[0])


def _monitored(span: tuple[Any, int], _result: object) -> None:
    # It is made of sends and receives, most of them on the first rank.
    group, before = span
    advance = _backend_number(group) - before
    if advance > _MONITORED:
        with _lock:
            _messages.setdefault(group, _PointToPoint()).advance += advance - _MONITORED


COUNT_NAMED = Site("", "point to point", begin=_named_message_begins, finish=_over, fail=_over)
"""The same for an operator, whose last argument is the group's name."""
COUNTS: tuple[Row, ...] = (
    *(
        Site(C10D, f"ProcessGroup.{name}", _message_begins, _over, _over, around=OF_GROUPS)
        for name in ("send", "recv", "recv_anysource")
    ),
    Site(C10D, "ProcessGroup.monitored_barrier", _barrier_begins, _monitored, around=OF_GROUPS),
)
"""What has to be seen at every level, so that all ranks agree on the number of a collective."""
