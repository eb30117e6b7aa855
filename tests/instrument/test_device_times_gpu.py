"""The times of a real GPU: work that the host only asks for is found to last as long as the device says itself."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.model.semconv import COLLECTIVE, Source
from tests.support.processes import Place

# Looked for without PyTorch, whose import takes seconds.
if not (importlib.util.find_spec("torch") and Path("/dev/nvidiactl").exists()):
    pytest.skip("needs torch and a CUDA device: there is no /dev/nvidiactl", allow_module_level=True)

PROGRAM = """
    import sys, time
    import otel_dltrace
    otel_dltrace.instrument()
    import torch

    def never(*args, **kwargs):
        raise AssertionError("somebody synchronises, or makes a stream wait")

    class Busy(torch.nn.Linear):
        def forward(self, x):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            planted.append((before, after))
            before.record()
            torch.cuda._sleep(50_000_000)
            after.record()
            return super().forward(x)

    planted = []
    model = Busy(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bare = torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.cuda.Event.wait, torch.cuda.Stream.wait_event
    torch.cuda.synchronize = torch.cuda.Event.synchronize = torch.cuda.Event.wait = never
    torch.cuda.Stream.wait_event = torch.cuda.Stream.wait_stream = never
    for _ in range(6):
        with otel_dltrace.phase("to_device"):
            x = torch.ones(32, 64).pin_memory().to("cuda", non_blocking=True)
        begins = time.monotonic()
        loss = model(x).sum()
        print(time.monotonic() - begins, file=sys.stderr)
        loss.backward()
        optimizer.step()
        while not torch.cuda.current_stream().query():
            time.sleep(0.001)
    print(*(before.elapsed_time(after) for before, after in planted))
    otel_dltrace.stop()
"""


def test_a_gpu_s_work_is_found_to_last_as_long_as_it_does(place: Place) -> None:
    """The forward has what the device took for it, within a tenth; the clocks are tied to a millisecond or better."""
    done = place.run(PROGRAM)
    assert done.returncode == 0, done.stderr
    planted = np.array(done.stdout.split(), float) * 1e6
    place.wait_for_rings()
    (batch,) = place.spans()
    rows = batch.rows[(batch["source"] == Source.DEVICE) & batch.lookup(lambda d: d.name == "forward", bool)]

    assert rows["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert abs(rows["size"] / planted - 1)[1:].max() < 0.1  # the first one loads kernels, too
    assert rows["b"].max() < 1_000_000
    for name in ("to_device", "backward", "optimizer"):
        is_it = batch.lookup(lambda d, name=name: d.name == name, bool)
        assert (batch["source"][is_it] == Source.DEVICE).sum() >= 4, name


GRAPH = """
    import otel_dltrace
    otel_dltrace.instrument()
    import torch

    model = torch.nn.Linear(64, 64).cuda()
    x = torch.ones(32, 64, device="cuda")
    with otel_dltrace.step():
        model(x)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        model(x)
    torch.cuda.synchronize()
    with otel_dltrace.step(), torch.no_grad(), otel_dltrace.phase("forward"), torch.cuda.graph(graph):
        y = model(x)
        with otel_dltrace.phase("to_device"):
            z = y + 1
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(z, model(x) + 1)
    otel_dltrace.stop()
"""


def test_the_capture_of_a_graph_is_left_alone(place: Place) -> None:
    """An event recorded or asked inside of it would end the capture with an error."""
    done = place.run(GRAPH)
    assert done.returncode == 0, done.stderr


COLLECTIVES = """
    import time
    import otel_dltrace
    otel_dltrace.instrument()
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor, kept = torch.ones(1 << 24, device="cuda"), []
    for _ in range(4):
        with otel_dltrace.step():
            kept.append(dist.all_reduce(tensor, async_op=True))
            kept.append(functional.all_reduce(tensor, "sum", dist.group.WORLD))
            time.sleep(0.5)
    otel_dltrace.stop()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("timing", "source"), [("1", Source.RECORDER), ("0", Source.HOST_ISSUE)])
def test_collectives_that_nobody_waits_for_have_what_the_recorder_measured(
    place: Place, timing: str, source: Source
) -> None:
    """NCCL's own watchdog tells, of a group of one; where nothing is measured only the call is known."""
    done = place.run(COLLECTIVES, TORCH_NCCL_ENABLE_TIMING=timing)
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    (batch,) = place.spans()

    sources = batch["source"][batch.is_kind(COLLECTIVE)].tolist()
    assert len(sources) == 8
    assert sources[2:] == [source] * 6  # on a busy machine the clocks are tied in the first step, and known behind it
