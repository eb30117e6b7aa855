"""Programs that record steps for as long as they are asked to, and what must be there of them."""

import contextlib
from pathlib import Path

import numpy as np

from tests.support.processes import Place

EVERYTHING = {"OTEL_DLTRACE_STEPS": "all", "OTEL_DLTRACE_SPAN_BUDGET": "0"}
SLACK_S = 25.0
"""For a busy machine; who waited for a collector's answer would take 60 s and more."""
STEPS = """
    import otel_dltrace as d, sys, time
    d.start()
    with d.phase("before any step"):
        pass
    for i in range(int(sys.argv[1])):
        with d.step(i):
            with d.operation("push_pull", size=8, tensor="w"):
                with d.phase("PUSH", size=8):
                    pass
        time.sleep(float(sys.argv[2]))
    print(time.monotonic(), flush=True)
"""
TAKEN_UP = """
    from pathlib import Path
    while not list(Path().glob("dltrace-*/hosts/*/drain.json")):
        time.sleep(0.01)
    print(time.monotonic(), flush=True)
"""
"""Goes on until the drain has told of the run, as long as that takes on a busy machine."""
ONE_STEP = """
    import otel_dltrace as d
    d.start()
    with d.step():
        pass
"""
ALONE = {"OTEL_DLTRACE": "1", "RANK": "0", "WORLD_SIZE": "1"}


def recorded(place: Place) -> set[bytes]:
    """Return the ids of the spans in the run directories; none is there twice."""
    ids = np.concatenate([batch["span_id"] for batch in place.spans()])
    assert len(np.unique(ids)) == len(ids)
    return {int(i).to_bytes(8, "big") for i in ids}


def fill(path: Path) -> None:
    """Write to *path* until nothing fits."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


def names(batch) -> list[str]:
    """Return the spans' names, in order of their start."""
    order = np.argsort(batch["start"], kind="stable")
    return [batch.descriptor_of(int(i)).name for i in order]
