"""Callbacks on futures of torch: their group does not end before torch has let them go, nor on another thread."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread, current_thread
from time import monotonic
from typing import Any
from weakref import finalize

import pytest

from otel_dltrace.instrument._torch import callbacks
from otel_dltrace.instrument._torch.callbacks import before_destroyed, called
from tests.support.torch_harness import run


class Future:
    """Holds a callback until it is told to let it go, as torch does on a thread of the backend."""

    def __init__(self) -> None:
        self.held: list[Callable[[Any], Any]] = []

    def completed(self) -> None:
        """Run the callback."""
        self.held[0](self)

    def let_go(self) -> None:
        """Let go of the callback on a thread of its own."""
        thread = Thread(target=self.held.clear)
        thread.start()
        thread.join()


class Group:
    """A process group."""


def watched(future: Future) -> list[Thread]:
    """Watch *future* of a group that nobody else holds; return the threads on which that has ended."""
    group, ended = Group(), []
    finalize(group, lambda: ended.append(current_thread()))
    called(future.held.append, partial(list.append, []), group)
    return ended


def test_a_group_ends_on_a_thread_of_the_program_once_its_callback_is_let_go() -> None:
    """It does not as soon as the callback has come: the backend's thread wants Python's lock once more."""
    future = Future()
    ended = watched(future)
    future.completed()
    before_destroyed(None)
    assert ended == []
    future.let_go()
    assert ended == []
    before_destroyed(None)
    assert ended == [current_thread()]


def test_a_group_is_not_held_where_its_future_takes_no_callback() -> None:
    """The error is the future's own."""
    group = Group()
    with pytest.raises(ZeroDivisionError):
        called(lambda _callback: 1 // 0, partial(list.append, []), group)
    assert not callbacks._is_held(group)


def test_only_the_group_that_is_destroyed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's callbacks may take their time."""
    monkeypatch.setattr(callbacks, "PATIENCE_S", 20.0)
    future = Future()
    watched(future)
    start = monotonic()
    before_destroyed(Group())
    assert monotonic() - start < 10
    future.let_go()
    before_destroyed(None)


BUSY = """
import sys, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    for _ in range(3):
        model(torch.ones(8, 64)).sum().backward()
    dist.destroy_process_group()

def compute():
    while not over:
        for _ in range(1000):
            pass
        time.sleep(0)

over = []
for _ in range(4):
    threading.Thread(target=compute, daemon=True).start()
for _ in range(20):
    train()
over.append(True)
"""


def test_a_program_goes_on_that_destroys_its_group_right_behind_a_backward(tmp_path: Path) -> None:
    """Busy threads keep Python's lock from those of the backend meanwhile; before PyTorch 2.8 it would hang."""
    pytest.importorskip("torch")
    (recorded,) = run(tmp_path, BUSY, level=4)
    assert len(recorded.spans("collective", "all_reduce")) == 20 * 3
