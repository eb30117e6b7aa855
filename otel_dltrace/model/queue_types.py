"""BytePS's queue types: the stages that a partition of a tensor goes through, in the order of BytePS's enum."""

from enum import IntEnum


class QueueType(IntEnum):
    """One stage of a push_pull; the numbers are BytePS's since 0.2.5."""

    COORDINATE_REDUCE = 0
    REDUCE = 1
    COPYD2H = 2
    PCIE_REDUCE = 3
    COORDINATE_PUSH = 4
    COMPRESS = 5
    PUSH = 6
    PULL = 7
    DECOMPRESS = 8
    COPYH2D = 9
    COORDINATE_BROADCAST = 10
    BROADCAST = 11
