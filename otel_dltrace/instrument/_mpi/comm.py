"""What is known of the MPI communication of one process: its groups, its requests, its descriptors."""

import weakref
from dataclasses import dataclass
from typing import Any

from otel_dltrace.instrument._mpi.buffers import NOTHING, content_of, name_of
from otel_dltrace.instrument._mpi.family import Call
from otel_dltrace.instrument._mpi.groups import Group, Groups, number_of
from otel_dltrace.instrument._mpi.requests import Part, Requests
from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import MPI, PHASE, WAIT
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Matched:
    """A message that a probe has matched, and nobody else can receive."""

    group: Group
    peer: int
    tag: int
    size: int
    number: int
    message: "weakref.ref[Any]"


class Comm:
    """The MPI communication of the process that *tracer* follows.

    Attributes:
        matched: The messages that probes have matched, by the identity of mpi4py's object.
    """

    def __init__(self, tracer: Tracer, module: Any) -> None:
        self.tracer, self.module = tracer, module
        wait = tracer.recorder.intern(Descriptor(PHASE, WAIT))
        self.groups = Groups(module)
        self.requests = Requests(tracer, wait, module.Status)
        self.any, self.in_place = module.ANY_SOURCE, module.IN_PLACE
        self.anything = (module.ANY_SOURCE, module.ANY_TAG)
        self.nobody = module.PROC_NULL
        self.matched: dict[int, Matched] = {}

    # -- descriptors ------------------------------------------------------------------------------

    def operation(
        self, span: str, group: Group, content: tuple[int, Any], kind: str, a: int, b: int, flags: int, series: str = ""
    ) -> Operation:
        """Begin an operation of *group*; *series* tells apart what is counted apart."""
        size, named = content
        return Operation(self.tracer.recorder, self.descriptor(span, group, named, kind, series), size, a, b, flags)

    def descriptor(self, span: str, group: Group, named: Any, kind: str, series: str = "") -> int:
        """Return the number of what the operations *span* of *group*, of the type that *named* names, have alike."""
        described = group.described[span + series]
        try:
            return described[named]
        except KeyError:
            number = described[named] = self._describe(span, group, named, kind, series)
            return number
        except TypeError:  # a datatype has no hash
            return self.descriptor(span, group, name_of(named), kind, series)

    def _describe(self, span: str, group: Group, named: Any, kind: str, series: str) -> int:
        self.groups.described += 1
        return self.tracer.recorder.intern(
            Descriptor(
                kind,
                span,
                group=group.id and group.id + series,
                group_size=group.size,
                backend=MPI,
                dtype=name_of(named) if named != "" else "",
            )
        )

    # -- calls ------------------------------------------------------------------------------------

    def content(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[int, Any]:
        """Return what *call* moves: of the buffers (or objects) that it may be given, the first one that it is."""
        for name, position, has_parts in call.takes:
            value = args[position] if position < len(args) else kwargs.get(name)
            if value is not None and value is not self.in_place:
                ranks = _ranks(call, args[0], name) if has_parts and isinstance(value, list | tuple) else 0
                return content_of(value, is_object=call.is_object, ranks=ranks, is_vector=has_parts and call.is_vector)
        return NOTHING

    def peer(self, group: Group, handle: Any, rank: Any, default: int) -> int:
        """Return the rank in the world of *rank* in *group*; NOBODY for any, for none, and for what is no rank."""
        return group.rank_in_world(handle, number_of(rank, default))

    def settle(self, group: Group, handle: Any, series: str, part: Part, status: Any) -> None:
        """Learn from *status* who has sent, with which tag, and how much."""
        operation, source = part.operation, status.Get_source()
        if source < 0:  # nothing has come
            operation.size = 0
            return
        count = status.Get_elements(self.module.BYTE)  # not Get_count: Open MPI has none above 2 GiB
        if count >= 0:
            operation.size = count
        operation.a, operation.b = group.rank_in_world(handle, source), status.Get_tag()
        part.seq = part.seq or group.number_message(series, operation.a, operation.b, sends=False)


def _ranks(call: Call, handle: Any, name: str) -> int:
    """Return how many parts the buffer *name* of a *call* on *handle* has."""
    if call.holder == "Topocomm":
        return int(handle.outdegree if name == "sendbuf" else handle.indegree)
    return int(handle.Get_remote_size() if handle.Is_inter() else handle.Get_size())


class Current:
    """The communication that the live tracer follows, where MPI is there; `comm` may be an earlier tracer's."""

    __slots__ = ("comm",)

    def __init__(self) -> None:
        self.comm: Comm | None = None


current = Current()
