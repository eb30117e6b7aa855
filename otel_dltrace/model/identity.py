"""Ids that every rank computes alike, without exchanging a message (contract 1)."""

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_PREFIX = b"otel_dltrace.1"
_LENGTHS = tuple(n.to_bytes(4, "little") for n in range(32))  # of a 64-bit integer in decimal, and to spare
_HEAD = struct.Struct(">Q24x")  # the first 8 of a digest's 32 bytes
_MOST_KNOWN = 4096
NO_STEP = 0xFFFF_FFFF
"""The step of a record made before the first step, or in a program without steps."""
NO_USER_STEP = 0xFFFF_FFFF_FFFF_FFFF
"""The size of a step record whose user gave no number."""


def _spell(*fields: str | int) -> bytes:
    texts = [str(field).encode("utf-8", "replace") for field in fields]
    return b"".join([len(text).to_bytes(4, "little") + text for text in texts])


def digest(tag: str, *fields: str | int) -> bytes:
    """Return SHA-256 over the project's tag and the fields, each as u32 length and UTF-8."""
    return hashlib.sha256(_PREFIX + _spell(tag, *fields)).digest()


@lru_cache(maxsize=4096, typed=True)  # the drain asks for each of its ranks
def h64(tag: str, *fields: str | int) -> int:
    """Return 64 bits of the digest, never 0."""
    return int.from_bytes(digest(tag, *fields)[:8], "big") or 1


def h64_each(tag: str, *fields: str | int, last: Iterable[int]) -> list[int]:
    """Return ``h64(tag, *fields, x)`` for each x of *last*; what they share is hashed once."""
    copy = _shared(tag, *fields).copy
    digests = []
    for x in last:
        text = b"%d" % x
        sha = copy()
        sha.update(_LENGTHS[len(text)] + text)
        digests.append(sha.digest())
    return [head or 1 for (head,) in _HEAD.iter_unpack(b"".join(digests))]


@lru_cache(maxsize=1024, typed=True)
def _shared(tag: str, *fields: str | int) -> "hashlib._Hash":
    return hashlib.sha256(_PREFIX + _spell(tag, *fields))


def h128(tag: str, *fields: str | int) -> int:
    """Return 128 bits of the digest; the top bit is set, as Tempo prints ids without leading zeros."""
    return int.from_bytes(digest(tag, *fields)[:16], "big") | 1 << 127


def mix64(x: Any) -> Any:
    """Return splitmix64 of *x*, an int or an array of uint64, which is changed: a bijection on 64 bits."""
    x += 0x9E37_79B9_7F4A_7C15
    x &= _MASK
    x ^= x >> 30
    x *= 0xBF58_476D_1CE4_E5B9
    x &= _MASK
    x ^= x >> 27
    x *= 0x94D0_49BB_1331_11EB
    x &= _MASK
    x ^= x >> 31
    return x


def span_id(nonce: Any, step: Any, span_no: Any) -> Any:
    """Return the id of a process's span: no random numbers, and a replay gives the same ids."""
    mixed = mix64(nonce ^ (step << 32 | span_no))
    return mixed + (mixed == 0)


@dataclass(frozen=True, slots=True)
class Bind:
    """Who a process is, learned early or late; holds from *from_step* on."""

    job: str
    generation: str
    job_name: str = "job"
    world: str = "default"
    role: str = "worker"
    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    servers: int = 0
    attempt: int = 0
    from_step: int = 0

    @property
    def generation_number(self) -> int:
        """The number before the random bytes; 0 where there is none."""
        head = self.generation.split(".", 1)[0]
        return int(head) if head.isdigit() else 0

    def fields(self) -> dict[str, Any]:
        """Return what is stored in the names file."""
        return asdict(self)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Bind":
        """Return the bind stored as *fields*; unknown ones, of a newer writer, are ignored."""
        return cls(**{k: v for k, v in fields.items() if k in cls.__dataclass_fields__})

    def from_now(self, step: int) -> "Bind":
        """Return the same identity, valid from *step*."""
        return replace(self, from_step=step)


class _Known(dict[int | str, int]):
    """Ids by step, or by a part of a run without steps: *make*, which computes one, is called once for all ranks."""

    def __init__(self, make: Callable[[int | str], int]) -> None:
        self._make = make

    def __missing__(self, part: int | str) -> int:
        if len(self) >= _MOST_KNOWN:
            self.clear()
        known = self[part] = self._make(part)
        return known


@lru_cache(maxsize=64)
def _traces(job: str, generation: str, world: str, shard: int) -> _Known:
    return _Known(partial(h128, "trace", job, generation, world, shard))


@lru_cache(maxsize=64)
def _roots(job: str, generation: str, world: str, shard: int) -> _Known:
    return _Known(partial(h64, "root", job, generation, world, shard))


def trace_id(bind: Bind, step: int | str, shard: int = 0) -> int:
    """Return the trace id that all ranks use for *step* (or for a named part of a run without steps)."""
    return _traces(bind.job, bind.generation, bind.world, shard)[step]


def trace_ids(bind: Bind, steps: Iterable[int | str], shard: int = 0) -> list[int]:
    """Return the trace ids of several *steps*, as `trace_id` does."""
    known = _traces(bind.job, bind.generation, bind.world, shard)
    return [known[step] for step in steps]


def root_id(bind: Bind, step: int | str, shard: int = 0) -> int:
    """Return the id of the root span of *step*."""
    return _roots(bind.job, bind.generation, bind.world, shard)[step]


def root_ids(bind: Bind, steps: Iterable[int | str], shard: int = 0) -> list[int]:
    """Return the ids of the root spans of several *steps*, as `root_id` does."""
    known = _roots(bind.job, bind.generation, bind.world, shard)
    return [known[step] for step in steps]


def rank_step_id(bind: Bind, step: int) -> int:
    """Return the id of this rank's step span."""
    return h64("rank", bind.job, bind.generation, bind.world, bind.role, bind.rank, step)


def rank_step_ids(bind: Bind, steps: Iterable[int]) -> list[int]:
    """Return the ids of this rank's step spans in each of *steps*."""
    return h64_each("rank", bind.job, bind.generation, bind.world, bind.role, bind.rank, last=steps)


def collective_ids(bind: Bind, kind: str, group: str, name: str, seqs: Sequence[int]) -> list[int]:
    """Return the ids that name collectives of one group on every rank."""
    series = "coll", bind.job, bind.generation, bind.world, kind, group, name
    known = _collectives(*series)
    new = [seq for seq in seqs if seq not in known]
    if len(known) + len(new) > _MOST_KNOWN:
        known.clear()
        new = [*seqs]
    known.update(zip(new, h64_each(*series, last=new), strict=True))
    return [known[seq] for seq in seqs]


@lru_cache(maxsize=64)
def _collectives(*_series: str) -> dict[int, int]:
    """Return the ids made so far of collectives of one group: all ranks of a drain have mostly the same."""
    return {}


def p2p_id(bind: Bind, group: str, source: int, destination: int, tag: int, nth: int) -> int:
    """Return the id that a send and its receive share."""
    return h64("p2p", bind.job, bind.generation, bind.world, group, source, destination, tag, nth)


def run_directory_name(bind: Bind) -> str:
    """Return ``dltrace-<job name>-<8 digits>``: one name per generation, the same on every host."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in bind.job_name)[:64] or "job"
    return f"dltrace-{name}-{h64(bind.job, bind.generation):016x}"[: len(name) + 17]
