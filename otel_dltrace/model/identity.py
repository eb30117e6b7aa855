"""Ids that every rank computes alike, without exchanging a message (contract 1)."""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_PREFIX = b"otel_dltrace.1"
_HEAD = struct.Struct(">Q24x")  # the first 8 of a digest's 32 bytes
_MOST_KNOWN = 4096
_MOST_DIGITS = 18
"""Of a number that an attribute can hold."""
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


def h64_each(tag: str, *fields: str | int, last: Iterable[int | str]) -> list[int]:
    """Return ``h64(tag, *fields, x)`` for each x of *last*; what they share is hashed once."""
    return [head or 1 for (head,) in _HEAD.iter_unpack(b"".join(_digests(tag, *fields, last=last)))]


def h128_each(tag: str, *fields: str | int, last: Iterable[int | str]) -> list[int]:
    """Return 128 bits of each digest; the top bit is set, as Tempo prints ids without leading zeros."""
    return [int.from_bytes(whole[:16], "big") | 1 << 127 for whole in _digests(tag, *fields, last=last)]


def _digests(tag: str, *fields: str | int, last: Iterable[int | str]) -> list[bytes]:
    copy = _hashed(tag, *fields).copy
    digests = []
    for x in last:
        text = b"%d" % x if isinstance(x, int) else x.encode("utf-8", "replace")
        sha = copy()
        sha.update(len(text).to_bytes(4, "little") + text)
        digests.append(sha.digest())
    return digests


@lru_cache(maxsize=1024, typed=True)
def _hashed(tag: str, *fields: str | int) -> "hashlib._Hash":
    return hashlib.sha256(_PREFIX + _spell(tag, *fields))


def _shared_ids(make: Callable[..., list[int]], tag: str, *fields: str | int, last: Sequence[int | str]) -> list[int]:
    """Return what *make* does; all ranks of a drain ask for the same, so what was made is remembered."""
    known = _known_ids(tag, *fields)
    ids = [known.get(x, 0) for x in last]
    if 0 not in ids:
        return ids
    new = dict.fromkeys(x for x, one in zip(last, ids, strict=True) if not one)
    made = dict(zip(new, make(tag, *fields, last=[*new]), strict=True))
    if len(known) + len(made) > _MOST_KNOWN:
        known.clear()  # another thread may look at the same time
    known.update(made)
    return [one or made[x] for x, one in zip(last, ids, strict=True)]


@lru_cache(maxsize=1024, typed=True)  # a series for each tensor of a push_pull
def _known_ids(*_fields: str | int) -> dict[int | str, int]:
    return {}


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
    """Who a process is, learned early or late.

    It holds from *from_step* on, and for what is in no step from *since* (monotonic ns).
    """

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
    since: int = field(default=0, compare=False)

    @property
    def generation_number(self) -> int:
        """The number before the random bytes; 0 where there is none."""
        head = self.generation.split(".", 1)[0]
        return int(head) if head.isdecimal() and len(head) <= _MOST_DIGITS else 0

    def fields(self) -> dict[str, Any]:
        """Return what is stored in the names file."""
        return asdict(self)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Bind":
        """Return the bind stored as *fields*; unknown ones, of a newer writer, are ignored."""
        return cls(**{k: v for k, v in fields.items() if k in cls.__dataclass_fields__})

    def from_now(self, step: int, now: int = 0) -> "Bind":
        """Return the same identity, valid from *step*, and *now*."""
        return replace(self, from_step=step, since=now)


def own_generation(generation: str, nonce: str) -> str:
    """Return a generation that only the process has whose ring's nonce (hex) is *nonce*."""
    number = generation.partition(".")[0] or "1"
    return f"{number}.{h64(nonce):016x}"


def bind_from_home(home: Mapping[str, Any], nonce: str) -> Bind:
    """Return who the environment of a process says it is, by its ring's *home*; by *nonce* (hex) where it says nothing.

    One that is "alone" there is no part of the run that the environment names, though other processes may be.
    """
    fields = dict(home.get("bind") or {})
    generation = fields.get("generation", "")
    is_own = not generation or home.get("alone", False)
    fields["generation"] = own_generation(generation, nonce) if is_own else generation
    fields["job"] = fields.get("job") or nonce
    return Bind.read(fields)


def trace_id(bind: Bind, step: int | str, shard: int = 0) -> int:
    """Return the trace id that all ranks use for *step* (or for a named part of a run without steps)."""
    return trace_ids(bind, [step], shard)[0]


def trace_ids(bind: Bind, steps: Sequence[int | str], shard: int = 0) -> list[int]:
    """Return the trace ids of several *steps*, as `trace_id` does."""
    return _shared_ids(h128_each, "trace", bind.job, bind.generation, bind.world, shard, last=steps)


def root_id(bind: Bind, step: int | str, shard: int = 0) -> int:
    """Return the id of the root span of *step*."""
    return root_ids(bind, [step], shard)[0]


def root_ids(bind: Bind, steps: Sequence[int | str], shard: int = 0) -> list[int]:
    """Return the ids of the root spans of several *steps*, as `root_id` does."""
    return _shared_ids(h64_each, "root", bind.job, bind.generation, bind.world, shard, last=steps)


def rank_step_id(bind: Bind, step: int) -> int:
    """Return the id of this rank's step span."""
    return h64("rank", bind.job, bind.generation, bind.world, bind.role, bind.rank, step)


def rank_step_ids(bind: Bind, steps: Iterable[int]) -> list[int]:
    """Return the ids of this rank's step spans in each of *steps*."""
    return h64_each("rank", bind.job, bind.generation, bind.world, bind.role, bind.rank, last=steps)


def collective_ids(bind: Bind, kind: str, group: str, name: str, seqs: Sequence[int]) -> list[int]:
    """Return the ids that name collectives of one group on every rank."""
    return _shared_ids(h64_each, "coll", bind.job, bind.generation, bind.world, kind, group, name, last=seqs)


def p2p_id(bind: Bind, group: str, source: int, destination: int, tag: int, nth: int) -> int:
    """Return the id that a send and its receive share."""
    return h64("p2p", bind.job, bind.generation, bind.world, group, source, destination, tag, nth)


def run_directory_name(bind: Bind) -> str:
    """Return ``dltrace-<job name>-<8 digits>``: one name per generation, the same on every host."""
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in bind.job_name)[:64] or "job"
    digits = f"{h64(bind.job, bind.generation):016x}"
    return f"dltrace-{name}-{digits[:8]}"
