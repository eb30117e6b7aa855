"""How a tensor is cut into partitions, how these are numbered, and which server keeps which: as BytePS does it."""

from collections.abc import Callable
from dataclasses import dataclass
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


def _built_in(key: int) -> int:
    """Hash as ``std::hash<std::string>`` of GNU's C++ library does: MurmurHash64A of the digits."""
    digits, multiplier = b"%d" % key, 0xC6A4A7935BD1E995
    value = 0xC70F6907 ^ len(digits) * multiplier & _WORD
    whole = len(digits) & ~7
    for place in range(0, whole, 8):
        word = int.from_bytes(digits[place : place + 8], "little") * multiplier & _WORD
        value = (value ^ (word ^ word >> 47) * multiplier & _WORD) * multiplier & _WORD
    if rest := digits[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * multiplier & _WORD
    value = (value ^ value >> 47) * multiplier & _WORD
    return value ^ value >> 47


BUILT_IN: Final = "built_in"
MIXED: Final = "mixed"
HASHES: Final[dict[str, Callable[[int], int]]] = {
    "djb2": _djb2,
    "sdbm": _sdbm,
    "naive": _naive,
    BUILT_IN: _built_in,
}
HASH_NAMES: Final = (*HASHES, MIXED)
"""The values of BYTEPS_KEY_HASH_FN."""


@dataclass(frozen=True, slots=True)
class KeyHash:
    """How keys are given to servers.

    Attributes:
        name: One of `HASH_NAMES`.
        coefficient: By what `BUILT_IN` is multiplied, BYTEPS_BUILT_IN_HASH_COEF; 1 with the others.
        bound: How many values `MIXED` tells apart, BYTEPS_MIXED_MODE_BOUND; at least one for each server.
    """

    name: str = "djb2"
    coefficient: int = 1
    bound: int = 101


def server_of(key: int, num_servers: int, key_hash: KeyHash, num_workers: int = 1) -> int:
    """Return which of *num_servers* keeps *key*."""
    if key_hash.name == MIXED:
        return _mixed(key, num_servers, num_workers, key_hash.bound)
    return (HASHES[key_hash.name](key) * key_hash.coefficient & _WORD) % num_servers


def mixed_share(num_servers: int, num_workers: int) -> float | None:
    """Return which share of the keys the servers on machines of their own keep, None if there is no such share.

    The last *num_workers* servers share a machine with a worker, and so its network.
    """
    alone = num_servers - num_workers
    rest = num_workers * num_servers - 2 * alone
    if alone < 0 or rest <= 0:
        return None
    share = 2.0 * alone * (num_workers - 1) / rest
    return share if share <= 1 else None


def _mixed(key: int, num_servers: int, num_workers: int, bound: int) -> int:
    share, alone = mixed_share(num_servers, num_workers), num_servers - num_workers
    assert share is not None
    place = _djb2(key) % bound
    if place < share * bound:
        return _djb2(place) % alone
    return alone + _djb2(place) % num_workers
