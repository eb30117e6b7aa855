"""One rank that makes usual calls in every way of writing them: ``mpi_usual.py FOLDER usual|general``.

Prints the records, but for their times and numbers. "general": none of the calls goes the short way.
"""

import sys
from contextlib import suppress
from pathlib import Path
from pickle import PicklingError

import numpy as np
from mpi4py import MPI

from otel_dltrace.instrument import mpi4py, registry
from otel_dltrace.record.blocks import phase
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live
from tests.support.ring_files import read_own

if sys.argv[2] == "general":
    mpi4py.is_usual = lambda _call: False
recorder = Recorder(Path(sys.argv[1]), 1 << 20)
live.tracer = Tracer(recorder)
registry.instrument(["mpi4py"])

here = MPI.COMM_SELF.Dup()
values, total = np.arange(3.0), np.empty(3)
here.Allreduce(values, total)
here.Allreduce(MPI.IN_PLACE, total, op=MPI.MAX)
here.Allreduce([values, MPI.DOUBLE], recvbuf=total)
here.allreduce({"a": 1}.get("a"))
here.Bcast(values)
here.Bcast(buf=values, root=0)
here.bcast("an object", 0)
here.Barrier()
with phase("around"):
    here.Reduce(values, total, root=0)
for tag in (3, 3, 4):
    here.Send(values, 0, tag)
    here.Recv(total, 0, tag)
for _ in range(100):  # more than a chunk holds: a new one takes what is given in another way
    here.Send(values, np.int32(0), np.int32(6))
    here.Recv(total, np.int32(0), np.int32(6))
here.Send(values, dest=0)
here.Recv(total)
here.Send([values, 2, MPI.DOUBLE], 0, tag=5)
here.Recv(total, MPI.ANY_SOURCE, 5, None)
for _ in range(2):
    here.Send(values, 0)
    here.Recv([total, MPI.DOUBLE], 0)
here.Send(values, 0, 5)
here.Recv(total, source=0, tag=5, status=MPI.Status())
here.send("an object", 0)
here.Recv(bytearray(64), 0, MPI.ANY_TAG, status := MPI.Status())
here.Ssend(values, MPI.PROC_NULL)
here.Recv(total, MPI.PROC_NULL, 1)
for wrong in (
    lambda: here.Send(values, 7),
    lambda: here.Send(values, 0, 1 << 40),
    lambda: here.Allreduce("no buffer", total),
    lambda: here.Recv(total, "0"),
    lambda: here.Send(values, "0"),
    lambda: here.Send(values, 0, "5"),
    lambda: here.Send(values, [0]),
    lambda: here.Send([values, 1, MPI.DATATYPE_NULL], 0),
    lambda: here.Bcast(values, "0"),
    lambda: here.bcast(None, "0"),
    lambda: here.send(lambda: None, 0, 5),
    lambda: here.Send("no buffer", 0, 5),
    lambda: here.Recv("no buffer", 0, 5),
):
    with suppress(MPI.Exception, TypeError, ValueError, OverflowError, AttributeError, PicklingError):
        wrong()
here.Send(values, 0, 5)
with suppress(MPI.Exception):
    here.Recv(total[:1], 0, 5)
here.Send(values, 0, 5)
here.Recv(total, 0, 5)
here.Send(values, 0.0, 5.0)
here.Recv(total, 0.0, 5.0)
here.Allreduce(values, total)
here.Free()
MPI.COMM_SELF.Allreduce(values, total)

registry.uninstrument()
live.tracer = None
read = read_own(recorder)
recorder.close()
for record in read.records:
    said = {name: value for name, value in record.items() if name not in ("number", "parent", "start", "end")}
    print(read.names.descriptors[record["descriptor"]] if record["kind"] != 3 else "amend", record["parent"] > 0, said)
print(status.tag, total.tolist())
