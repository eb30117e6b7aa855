"""How a tensor is cut into partitions, how these are numbered, and which server keeps which: as BytePS does it."""

from collections.abc import Callable
from typing import Final

PAGE: Final = 4096
PARTITION_BITS: Final = 16
_WORD: Final = (1 << 64) - 1


def partition_bound(wanted: int, local_size: int) -> int:
    """Return *wanted* bytes rounded up, so that each local rank's share of a partition fills whole pages."""
    unit = local_size * PAGE
    return -(-wanted // unit) * unit


def partitions(nbytes: int, bound: int) -> list[tuple[int, int]]:
    """Return offset and size in bytes of each partition of a tensor; the last one holds the remainder."""
    return [(start, min(bound, nbytes - start)) for start in range(0, nbytes, bound)]


def key_of(declared_key: int, partition: int) -> int:
    """Return the key of a partition, unique in the job."""
    return declared_key << PARTITION_BITS | partition


def _djb2(key: int) -> int:
    value = 5381
    for digit in b"%d" % key:
        value = value * 33 + digit & _WORD
    return value


def _sdbm(key: int) -> int:
    value = 0
    for digit in b"%d" % key:
        value = value * 65599 + digit & _WORD
    return value


def _naive(key: int) -> int:
    return ((key >> PARTITION_BITS) + key % (1 << PARTITION_BITS)) * 9973


HASHES: Final[dict[str, Callable[[int], int]]] = {"djb2": _djb2, "sdbm": _sdbm, "naive": _naive}
"""By the value of BYTEPS_KEY_HASH_FN. Its ``built_in`` hashes a C++ pointer's text, alike on no two builds."""


def server_of(key: int, num_servers: int, hash_name: str) -> int:
    """Return which of *num_servers* keeps *key*."""
    return HASHES[hash_name](key) % num_servers
