"""What is constant about a span: the descriptor, interned once per process, then a number."""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from otel_dltrace.model import semconv
from otel_dltrace.model.activities import BACKEND as HOROVOD
from otel_dltrace.model.text import clean

MAX_DESCRIPTORS = 1 << 16
MAX_TEXT = 4096
_NUMBERS = ("group_size", "key")
_NONAME = re.compile(r"\.noname\.\d+(?=\Z|_\d+of\d+\Z)")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The constant part of a span.

    *kind* is one of ``step stage collective p2p phase tick metric`` and says how a
    record's fields are read; *key* is BytePS's declared key, -1 for none.
    """

    kind: str
    name: str
    group: str = ""
    group_size: int = 0
    backend: str = ""
    tensor: str = ""
    key: int = -1
    queue_type: str = ""
    activity: str = ""
    dtype: str = ""

    @property
    def is_bucket(self) -> bool:
        """Whether it is a bucket of gradients, for which DDP waits at the end of the backward."""
        return self.kind == semconv.COLLECTIVE and self.tensor.startswith("bucket ")

    def normal(self) -> "Descriptor":
        """Return the descriptor as it is stored: text bounded, a name that is a number as text.

        Horovod numbers unnamed tensors without end (``allreduce.noname.17``), which would grow the table for ever: they
        are folded. BytePS's numbers tell parameters apart. A name of a megabyte would fill the names file.
        """
        fields: dict[str, Any] = {
            k: int(v) if k in _NUMBERS else _clean(v if isinstance(v, str) else str(v)) for k, v in asdict(self).items()
        }
        if self.backend == HOROVOD:
            fields["tensor"] = _NONAME.sub(".noname.N", fields["tensor"])
        return replace(self, **fields)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Descriptor":
        """Return the descriptor stored as *fields*; unknown ones, of a newer writer, are ignored."""
        return cls(**{k: v for k, v in fields.items() if k in cls.__dataclass_fields__}).normal()

    def fields(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for storing."""
        return {k: v for k, v in asdict(self).items() if v != _DEFAULTS.get(k)}


def _clean(text: str) -> str:
    return clean(text[:MAX_TEXT])


_DEFAULTS = {name: f.default for name, f in Descriptor.__dataclass_fields__.items() if name not in ("kind", "name")}
OTHER = Descriptor(semconv.PHASE, semconv.OTHER)
RANK_STEP = Descriptor(semconv.STEP, semconv.RANK_STEP)
