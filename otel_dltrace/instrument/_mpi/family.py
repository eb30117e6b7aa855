"""A family of mpi4py's methods, and the methods of it: what a row of the table says."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from otel_dltrace.instrument._sites import Args, Kwargs


class Role(Enum):
    """What a call does, which says how its span is read."""

    COLLECTIVE = "collective"
    SEND = "send"
    RECEIVE = "receive"
    SEND_RECEIVE = "send and receive"
    PROBE = "probe"
    MATCHED = "receive of a probed message"
    CREATE = "collective that makes a communicator, window or file"
    FREE = "collective that frees one"
    ONE_SIDED = "one-sided"
    LOCAL = "of this rank alone"
    START = "start of a persistent request"


class Form(Enum):
    """How a method of a family ends."""

    BLOCKING = ""
    REQUEST = "I"
    PERSISTENT = "_init"


@dataclass(frozen=True)
class Call:
    """A family of methods, or one method of it.

    Attributes:
        name: The method's name.
        parameters: Its parameters after ``self``, in order.
        role: What it does.
        holder: The class that defines it.
        buffers: The parameters whose bytes count: of the first one that is given.
        parts: Those of them that have a part for each rank: a count that goes with one is that of a part.
        root: The parameter that is the root's rank.
        peer: The parameter that is the other side's rank; for both directions: the destination's.
        tag: The parameter that is the tag.
        source: For both directions: the source's rank and the tag of what it sends.
        forms: The other methods of the family: ``I``, ``init``, ``object`` and ``iobject``.
        part: For one that makes a communicator: what tells it from others made by the same call,
            ``ranks`` or a parameter; "" if nothing does.
        form: How it ends.
        on_class: It is a class method.
        comm: The parameter that is the communicator, of class methods.
        is_object: It moves Python objects, pickled.
    """

    name: str
    parameters: str = ""
    role: Role = Role.COLLECTIVE
    holder: str = "Comm"
    buffers: str = ""
    parts: str = ""
    root: str = ""
    peer: str = ""
    tag: str = ""
    source: tuple[str, str] = ("", "")
    forms: str = ""
    part: str = ""
    form: Form = Form.BLOCKING
    on_class: bool = False
    comm: str = ""
    is_object: bool = field(init=False, compare=False)
    positions: dict[str, int] = field(init=False, compare=False)
    span: str = field(init=False, compare=False)
    takes: tuple[tuple[str, int, bool], ...] = field(init=False, compare=False)
    first_buffer: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Number the parameters; name the span."""
        object.__setattr__(self, "is_object", self.name[0].islower())
        object.__setattr__(self, "positions", {name: i + 1 for i, name in enumerate(self.parameters.split())})
        object.__setattr__(self, "span", self.name.removesuffix("_init").lower())
        taken = [name for name in self.buffers.split() if name in self.positions]
        object.__setattr__(
            self, "takes", tuple((name, self.positions[name], name in self.parts.split()) for name in taken)
        )
        object.__setattr__(self, "first_buffer", self.takes[0][1] if taken and not self.is_object else 0)

    @property
    def is_vector(self) -> bool:
        """Whether the parts of its buffers may differ in size, for a collective that has parts."""
        return self.span[-1] in "vw"

    def argument(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Return the argument for parameter *name* of a call, None if it is not given."""
        position = self.positions.get(name, 0)
        return args[position] if 0 < position < len(args) else kwargs.get(name)

    def methods(self) -> Iterator["Call"]:
        """Yield the methods of the family, this one first."""
        yield replace(self, forms="")
        lower = self.name.lower()
        for form in self.forms.split():
            if form == "I":
                yield self._without("status", name=f"I{lower}", form=Form.REQUEST)
            elif form == "init":
                yield self._without("status", name=f"{self.name}_init", form=Form.PERSISTENT)
            elif form == "object":
                yield self._of_objects(lower)
            else:
                yield self._of_objects(lower)._without("status", name=f"i{lower}", form=Form.REQUEST)

    def _without(self, *names: str, **changes: Any) -> "Call":
        left = " ".join(name for name in self.parameters.split() if name not in names)
        return replace(self, parameters=left, forms="", **changes)

    def _of_objects(self, lower: str) -> "Call":
        """Return the method that moves objects: it returns what the other one takes as ``recvbuf``."""
        if self.role is Role.RECEIVE:
            return self._without(name=lower)
        dropped = () if self.role is Role.SEND_RECEIVE else ("recvbuf",)
        call = self._without(*dropped, name=lower)
        names = {"sendbuf": "sendobj", "buf": "obj"}
        parameters, buffers = (
            " ".join(names.get(name, name) for name in text.split()) for text in (call.parameters, self.buffers)
        )
        return replace(call, parameters=parameters, buffers=buffers)
