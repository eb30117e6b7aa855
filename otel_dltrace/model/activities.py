"""What Horovod's timeline calls things: requests, the phases of an operation, ready ticks, cycle marks."""

from typing import Final

BACKEND: Final = "horovod"
NEGOTIATE: Final = "NEGOTIATE_"
READY: Final = "ready"  # a tick: a rank is ready for the operation
CYCLE_START: Final = "CYCLE_START"  # a tick: the coordinator's background thread begins a round
END: Final = "END"  # a tick: an operation is over that was not seen to begin, as Horovod ends BARRIER and JOIN
TIMELINE_START: Final = "TIMELINE_START"  # a tick: `hvd.init`, or where a timeline begins so many us later
MARK: Final = "MARK"  # a tick of any other name, which is its activity
ERROR: Final = "ERROR"
JOIN: Final = "JOIN"
JOIN_TENSOR: Final = "join.noname"
UNNAMED: Final = ".noname."  # in a tensor's name that the program did not give: handles number its operations
OPERATIONS: Final = (
    "ALLREDUCE",
    "ALLGATHER",
    "BROADCAST",
    JOIN,
    "ADASUM",
    "ALLTOALL",
    "BARRIER",
    "REDUCESCATTER",
    ERROR,
)
"""What rank 0 answers to requests: the bar around an operation's activities (message.h)."""
UNCUT: Final = ("BARRIER", JOIN)
"""Requests for no tensor: that one comes again says nothing of a step."""

ITEM_SIZES: Final = {
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
