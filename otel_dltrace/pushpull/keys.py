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


HASHES: Final[dict[str, Callable[[int], int]]] = {
    "djb2": _djb2,
    "sdbm": _sdbm,
    "naive": _naive,
    "built_in": _built_in,
}
MIXED: Final = "mixed"
HASH_NAMES: Final = (*HASHES, MIXED)
"""The values of BYTEPS_KEY_HASH_FN."""
_MIXED_BOUND: Final = 101
"""BYTEPS_MIXED_MODE_BOUND unless set."""


def server_of(key: int, num_servers: int, hash_name: str, num_workers: int = 1) -> int:
    """Return which of *num_servers* keeps *key*; *hash_name* is one of `HASH_NAMES`."""
    if hash_name == MIXED:
        return _mixed(key, num_servers, num_workers)
    return HASHES[hash_name](key) % num_servers


def mixed_share(num_servers: int, num_workers: int) -> float | None:
    """Return which share of the keys the servers on machines of their own keep, None if there is no such share.

    The last *num_workers* servers share a machine with a worker, and so its network.
    """
    alone = num_servers - num_workers
    rest = num_workers * num_servers - 2 * alone
    if alone < 0 or rest <= 0 or num_servers > _MIXED_BOUND:
        return None
    share = 2.0 * alone * (num_workers - 1) / rest
    return share if share <= 1 else None


def _mixed(key: int, num_servers: int, num_workers: int) -> int:
    share, alone = mixed_share(num_servers, num_workers), num_servers - num_workers
    assert share is not None
    place = _djb2(key) % _MIXED_BOUND
    if place < share * _MIXED_BOUND:
        return _djb2(place) % alone
    return alone + _djb2(place) % num_workers
