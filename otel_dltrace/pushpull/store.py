"""What a server knows and answers, without I/O: sums of pushes by key and round, and who has gone.

A synchronous key is summed anew in each round. A worker pushes once a round, and may pull the sum when all have
pushed. A worker starts the next round when it has pulled this one, so at most two rounds of a key are alive. An
asynchronous key is one value that pushes add to; it is pulled at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from otel_dltrace.pushpull.errors import MismatchError, PeerLostError, shown
from otel_dltrace.pushpull.keys import PARTITION_BITS
from otel_dltrace.pushpull.wire import Request, Values


@dataclass(slots=True)
class _Round:
    """One round of a key: the sum so far, and who had a part in it."""

    total: Values
    packing: int
    pushed: set[int] = field(default_factory=set)
    pulled: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Entry:
    """A key: what its first request said about it, and its values."""

    first: Request
    rounds: dict[int, _Round] = field(default_factory=dict)
    value: Values | None = None


class Store:
    """The state of one server, of *num_servers*, of a job with *num_workers* workers."""

    def __init__(self, num_workers: int, num_servers: int = 1) -> None:
        self.num_workers = num_workers
        self._agreed = {"DMLC_NUM_SERVER": ("the server", str(num_servers))}
        self.failure = ""
        self.joined: set[int] = set()
        self.left: set[int] = set()
        self._entries: dict[int, _Entry] = {}
        self._names: dict[str, Request] = {}

    @property
    def complete(self) -> bool:
        """Whether all workers have come."""
        return len(self.joined) == self.num_workers

    @property
    def deserted(self) -> bool:
        """Whether all workers have come and left; one that comes after a failure is still to be told of it."""
        return self.complete and self.joined == self.left

    def join(self, worker: int, num_workers: int, agreed: Mapping[str, str]) -> None:
        """Let *worker* in, which believes the job to have *num_workers* workers that all say *agreed* of it.

        Raises:
            MismatchError: It is wrong, or is here already.
        """
        if num_workers != self.num_workers or not self.knows(worker):
            raise MismatchError(f"worker {worker} of {num_workers} came, but the server's job has {self.num_workers}")
        if worker in self.joined:
            raise MismatchError(f"worker {worker} is here already; does each have its own DMLC_WORKER_ID?")
        for name, value in agreed.items():
            self._check_agreed(f"worker {worker}", name, value)
        self._agreed = {name: (f"worker {worker}", value) for name, value in agreed.items()} | self._agreed
        self.joined.add(worker)

    def _check_agreed(self, worker: str, name: str, value: str) -> None:
        who, known = self._agreed.get(name, (worker, value))
        if known != value:
            raise MismatchError(f"{worker} has {name}={value}, and {who} {name}={known}; give all the same value")

    def knows(self, worker: int) -> bool:
        """Return whether the job has such a worker."""
        return 0 <= worker < self.num_workers

    def leave(self, worker: int, reason: str = "") -> None:
        """Let *worker* go; with a *reason* the job cannot go on, and whoever asks is told so."""
        if worker in self.left:
            return
        if self.knows(worker):
            self.left.add(worker)
        if reason:
            self.fail(f"worker {worker}: {reason}")

    def fail(self, reason: str) -> None:
        """Note why the job cannot go on; the first reason holds."""
        self.failure = self.failure or reason

    def check_job(self) -> None:
        """See that the job can go on.

        Raises:
            PeerLostError: It cannot.
        """
        if self.failure:
            raise PeerLostError(self.failure)

    def initialize(self, request: Request, values: Values) -> None:
        """Give an asynchronous key the value that its first worker has; later ones change nothing."""
        entry = self._entry(request)
        if entry.value is None:
            entry.value = values.copy()

    def push(self, request: Request, values: Values) -> bool:
        """Add *values* to the sum that *request* names; return whether that is complete now.

        Raises:
            MismatchError: It does not fit what others pushed, or was pushed already.
            PeerLostError: The job cannot go on.
        """
        self.check_job()
        entry = self._entry(request)
        if request.asynchronous:
            self._add(entry, values)
            return True
        current = entry.rounds.get(request.round)
        if current is None:
            current = entry.rounds[request.round] = _Round(values.copy(), request.packing)
        elif request.worker in current.pushed:
            raise MismatchError(f"{_named(request)}: worker {request.worker} pushes round {request.round} again")
        elif request.packing != current.packing:
            raise MismatchError(f"{_named(request)}: worker {request.worker} compresses it differently")
        else:
            _sum_into(current.total, values)
        current.pushed.add(request.worker)
        return len(current.pushed) == self.num_workers

    def pull(self, request: Request) -> tuple[int, Values] | None:
        """Return packing and values that *request* asks for, None while pushes are missing.

        Raises:
            PeerLostError: The job cannot go on, or a worker left without having pushed.
        """
        entry = self._entry(request)
        if request.asynchronous:
            if entry.value is None:
                raise MismatchError(f"{_named(request)} is pulled before it has a value")
            return request.packing, entry.value
        current = entry.rounds.get(request.round)
        if current is None or len(current.pushed) < self.num_workers:
            self.check_job()
            self._check_missing(request)
            return None
        current.pulled.add(request.worker)
        if len(current.pulled) == self.num_workers:
            del entry.rounds[request.round]
        return current.packing, current.total

    def missing(self, request: Request) -> list[int]:
        """Return the workers that have not pushed what *request* asks for."""
        current = self._entry(request).rounds.get(request.round)
        return sorted(set(range(self.num_workers)) - (current.pushed if current else set()))

    def _check_missing(self, request: Request) -> None:
        gone = [worker for worker in self.missing(request) if worker in self.left]
        if gone:
            raise PeerLostError(
                f"worker {gone[0]} has left and never pushed round {request.round} of {shown(request.name)}"
            )

    def _entry(self, request: Request) -> _Entry:
        if not self.knows(request.worker):
            raise MismatchError(f"{_named(request)} is of worker {request.worker}; there are {self.num_workers}")
        entry = self._entries.get(request.key)
        if entry is None:
            self._check_name(request)
            entry = self._entries[request.key] = _Entry(request)
        if _facts(entry.first) != _facts(request):
            first = entry.first
            raise MismatchError(
                f"{_named(request)} of worker {request.worker} is {_named(first)} on worker {first.worker}; "
                "declare the same tensors in the same order everywhere, with the same partition size"
            )
        return entry

    def _check_name(self, request: Request) -> None:
        """See that no worker gives the name another key: each would wait for the other's push until the timeout."""
        first = self._names.setdefault(request.name, request)
        if first.key >> PARTITION_BITS != request.key >> PARTITION_BITS:
            raise MismatchError(
                f"{shown(request.name)} has the key {request.key} on worker {request.worker}, and {first.key} on "
                f"worker {first.worker}; declare the same tensors in the same order everywhere"
            )

    @staticmethod
    def _add(entry: _Entry, values: Values) -> None:
        if entry.value is None:
            entry.value = values.copy()
        else:
            _sum_into(entry.value, values)


def _sum_into(total: Values, values: Values) -> None:
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite gradient is for the GradScaler to find
        np.add(total, values, out=total)


def _facts(request: Request) -> tuple[str, str, int, bool]:
    return request.name, request.dtype, request.nbytes, request.asynchronous


def _named(request: Request) -> str:
    return f"key {request.key} ({shown(request.name)}, {request.nbytes} bytes of {request.dtype})"
