"""Programs that the tests of the ring run as processes of their own: ``ring_writer.py PROGRAM FOLDER ...``."""

import gc
import itertools
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from types import FrameType

from otel_dltrace.record.recorder import Recorder
from tests.support.ring_files import by_lane, lane_descriptor, read_file, write_checked

FOLDER = Path(sys.argv[2])


def forever(recorder: Recorder, lane: int, published: memoryview) -> None:
    """Write records of *lane* without end; after each, say in *published* how many there are."""
    descriptor = recorder.intern(lane_descriptor(lane))
    seq = 0
    while True:
        write_checked(recorder, descriptor, lane, seq)
        seq += 1
        published[lane * 16] = seq


def kills(count: int, size: int) -> None:
    """Fork *count* writers of 1 to 8 threads, kill each at a random instant, check what each left."""
    instants = random.Random(size)
    seen = {"kills": 0, "records": 0, "lapped": 0}
    for round_ in range(count):
        # One store of four bytes each: packing into the map would zero the number first, and a kill see that.
        published = memoryview(mmap.mmap(-1, 4096)).cast("I")
        threads = 1 + round_ % 8
        pid = os.fork()
        if pid == 0:
            recorder = Recorder(FOLDER, size)
            for lane in range(threads):
                threading.Thread(target=forever, args=(recorder, lane, published), daemon=True).start()
            signal.pause()
        while not published[0]:  # it has begun; now any instant will do
            time.sleep(0.0005)
        time.sleep(instants.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        records, lapped = check_killed(published, threads)
        seen = {"kills": seen["kills"] + 1, "records": seen["records"] + records, "lapped": seen["lapped"] + lapped}
    print(json.dumps(seen))


def check_killed(published: memoryview, threads: int) -> tuple[int, int]:
    """Check the one ring in the folder against what its threads said that they wrote; remove it."""
    (path,) = FOLDER.glob("*.ring")
    read = read_file(path)
    lanes = by_lane(read)
    said = [published[lane * 16] for lane in range(threads)]
    for lane, seqs in lanes.items():
        assert len(seqs) == len(set(seqs)), f"lane {lane}: a record came twice"
        assert seqs[-1] <= said[lane], f"lane {lane}: {seqs[-1]} of {said[lane]}"
        if not read.lapped:
            assert seqs == list(range(len(seqs))), f"lane {lane} has a hole"
            assert len(seqs) >= said[lane], f"lane {lane}: {said[lane]} were written, {len(seqs)} are there"
    assert sum(said) <= len(read.records) + read.lapped <= sum(said) + threads, (said, len(read.records), read.lapped)
    path.unlink()
    path.with_suffix(".names").unlink()
    return len(read.records), read.lapped


def busy(seconds: float, size: int) -> None:
    """Write from threads, a signal handler, a garbage collection callback and dying threads; then end in peace."""
    recorder = Recorder(FOLDER, size)
    counts = [itertools.count() for _ in range(7)]  # atomic: the handler interrupts itself, too
    descriptors = {lane: recorder.intern(lane_descriptor(lane)) for lane in range(7)}

    def write(lane: int, records: int) -> None:
        for _ in range(records):
            write_checked(recorder, descriptors[lane], lane, next(counts[lane]))

    def handler(_signal: int, _frame: FrameType | None) -> None:
        write(4, 100)  # more than a chunk: the interrupted record's chunk is replaced under it
        if time.monotonic() < deadline:
            signal.setitimer(signal.ITIMER_REAL, 0.001)  # only now, else slow machines nest it without end

    def collected(phase: str, _info: dict[str, int]) -> None:
        if phase == "stop" and threading.current_thread() is threading.main_thread():
            write(5, 70)

    deadline = time.monotonic() + seconds

    def work(lane: int) -> None:
        while time.monotonic() < deadline:
            write(lane, 10)

    threads = [threading.Thread(target=work, args=(lane,)) for lane in (1, 2, 3)]
    for thread in threads:
        thread.start()
    write(0, 1)
    assert recorder.ring is not None
    print(recorder.ring.path, flush=True)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    gc.callbacks.append(collected)
    while time.monotonic() < deadline:
        write(0, 10)
        gc.collect(0)
        short = threading.Thread(target=write, args=(6, 1))
        short.start()
        short.join()
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.callbacks.remove(collected)
    for thread in threads:
        thread.join()
    recorder.close()
    print(json.dumps([next(count) for count in counts]), flush=True)


def fork() -> None:
    """Fork while threads record, once from a signal handler too; every process writes its own ring."""
    warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tried here
    recorder = Recorder(FOLDER, 1 << 20)
    descriptor = recorder.intern(lane_descriptor(0))
    os.register_at_fork(after_in_child=recorder.after_fork)
    stop = threading.Event()

    def work() -> None:
        other = recorder.intern(lane_descriptor(1))
        seq = 0
        while not stop.is_set():
            write_checked(recorder, other, 1, seq)
            seq += 1

    def child() -> int:
        pid = os.fork()
        if pid == 0:
            for seq in range(100):
                write_checked(recorder, descriptor, 0, seq)
            write_checked(recorder, recorder.intern(lane_descriptor(2)), 2, 0)  # new in the child
            os._exit(0)
        return pid

    children = []
    signal.signal(signal.SIGUSR1, lambda *_: children.append(child()))
    thread = threading.Thread(target=work)
    thread.start()
    for seq in range(100):
        write_checked(recorder, descriptor, 0, seq)
        if seq in (20, 50):
            children.append(child())
        if seq == 70:
            signal.raise_signal(signal.SIGUSR1)
    stop.set()
    thread.join()
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert recorder.ring is not None
    print(recorder.ring.path)
    recorder.close()


if __name__ == "__main__":
    {"kills": kills, "busy": busy, "fork": fork}[sys.argv[1]](*(json.loads(text) for text in sys.argv[3:]))
