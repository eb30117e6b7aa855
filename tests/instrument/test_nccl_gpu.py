"""Two ranks on one real GPU, over NCCL: what its collectives are called, and when and how long they were, is so."""

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.analysis.compose import analyse
from otel_dltrace.model.semconv import COLLECTIVE, Source
from otel_dltrace.model.spans import SpanBatch
from tests.support.processes import Place

# Looked for without PyTorch, whose import takes seconds.
if not (importlib.util.find_spec("torch") and Path("/dev/nvidiactl").exists()):
    pytest.skip("needs torch and a CUDA device: there is no /dev/nvidiactl", allow_module_level=True)

BEGIN = """
    import json, os, time
    from pathlib import Path
    rank = int(os.environ["RANK"])
    # NCCL refuses two ranks on one GPU of a host: so each says that it has a host to itself.
    os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    import otel_dltrace
    otel_dltrace.instrument()
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    torch.cuda.set_device(0)
"""
NCCL = """
    dist.init_process_group("nccl")
"""
COLLECTIVES = """
    tensor, large = torch.ones(1 << 22, device="cuda"), torch.ones(1 << 24, device="cuda")
    halves = torch.empty(1 << 23, device="cuda")
    for _ in range(3):
        with otel_dltrace.step():
            dist.all_reduce(tensor)
            time.sleep(0.3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for step in range(6):
            with otel_dltrace.step():
                if step == 3 and rank == 1:
                    time.sleep(0.2)
                dist.all_reduce(tensor)
                dist.all_reduce(large, async_op=True).wait()
                kept = dist.all_reduce(large, async_op=True)
                functional.all_reduce(tensor, "sum", dist.group.WORLD)
                dist.all_gather_into_tensor(halves, tensor)
                dist.broadcast(tensor, 1)
                torch.cuda.synchronize()
                time.sleep(0.3)
    profile.export_chrome_trace(f"rank{rank}.json.gz")
    otel_dltrace.stop()
    dist.destroy_process_group()
"""


def test_collectives_last_as_long_and_end_when_their_kernels_do(place: Place) -> None:
    """Those that block, are waited for, and that nobody waits for; the last ones by PyTorch's Flight Recorder."""
    done = place.torchrun(BEGIN + NCCL + COLLECTIVES, TORCH_NCCL_ENABLE_TIMING="1", OTEL_DLTRACE_STEPS="all")
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    batches = place.spans()

    assert sorted(batch.rank for batch in batches) == [0, 1]
    for batch in batches:
        trace = json.loads(gzip.decompress((place.folder / f"rank{batch.rank}.json.gz").read_bytes()))
        kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel" and "nccl" in event["name"]]
        begins, lasted = (np.array([event[name] * 1e3 for event in kernels]) for name in ("ts", "dur"))
        ends = begins + lasted + trace["baseTimeNanoseconds"] - batch.wall
        rows = batch.rows[batch.is_kind(COLLECTIVE)]
        rows = np.sort(rows[rows["end"] > ends.min() - 1e6], order="end")
        off = np.abs(rows["end"] - np.sort(ends))
        by_recorder = rows["source"] == Source.RECORDER
        longer = np.abs(rows["end"] - rows["start"] - lasted[np.argsort(ends)])[by_recorder]
        assert set(rows["source"].tolist()) == {Source.DEVICE, Source.RECORDER}
        # The other rank has the GPU now and then, also when clocks are tied.
        assert np.median(off) < 200_000
        assert np.median(longer) < 100_000


DDP = """
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Slow(nn.Linear):
        def forward(self, x):
            if rank == 1:
                torch.cuda._sleep(80_000_000)
            return super().forward(x)

    model = DistributedDataParallel(nn.Sequential(Slow(1024, 1024), nn.Linear(1024, 1024)).cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.ones(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    time.sleep(0.5)
    otel_dltrace.stop()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("timing", ["1", "0"])
def test_the_rank_whose_device_is_slow_is_named(place: Place, timing: str) -> None:
    """Its forward, though both hosts launch all steps at once; with the recorder's times the collectives confirm it."""
    done = place.torchrun(BEGIN + NCCL + DDP, TORCH_NCCL_ENABLE_TIMING=timing)
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    report = analyse(place.spans())
    (found,) = report.stragglers.found

    assert (found.rank, found.stage) == (1, "forward")
    assert (found.arrivals > 0) == (timing == "1")


BOTH_BACKENDS = """
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device if os.environ["BOUND"] else None)
    host, there = torch.ones(4), torch.ones(4, device=device)
    with otel_dltrace.step():
        dist.all_reduce(there)
        dist.all_reduce(host)
        dist.barrier()
        dist.all_gather_object([None, None], rank)
        dist.broadcast(there, 0)
        dist.barrier(device_ids=[0])
        dist.group.WORLD.barrier().wait()
        dist.all_reduce(there, async_op=True).wait()
        torch.cuda.synchronize()
    entries = json.loads(torch._C._distributed_c10d._dump_nccl_trace_json(True, False))["entries"]
    seen = [(one["collective_seq_id"], one["profiling_name"]) for one in entries]
    Path(f"rank{rank}.json").write_text(json.dumps(seen))
    otel_dltrace.stop()
    dist.destroy_process_group()
"""
CALLED = [
    *("all_reduce", "all_reduce", "barrier", "all_gather_object"),
    *("broadcast", "barrier", "barrier", "all_reduce"),
]
RECORDER_S_NAMES = {
    "nccl:all_reduce": "all_reduce",
    "nccl:broadcast": "broadcast",
    "nccl:all_reduce_barrier": "barrier",
}


def described(batch: SpanBatch) -> Iterator[tuple[str, str, int]]:
    """Yield name, backend and number of each collective, in the order in which they began."""
    found = batch.take(batch.is_kind(COLLECTIVE))
    for row in np.argsort(found.rows["start"]).tolist():
        descriptor = found.descriptor_of(row)
        yield descriptor.name, descriptor.backend, int(found["seq"][row])


@pytest.mark.parametrize("bound", ["", "1"], ids=["any device", "device_id"])
def test_a_group_of_gloo_and_nccl_counts_what_nccl_does(place: Place, bound: str) -> None:
    """Each call has the backend that it goes to; the number is that of the Flight Recorder, where it is NCCL's."""
    done = place.torchrun(BEGIN + BOTH_BACKENDS, OTEL_DLTRACE_STEPS="all", TORCH_FR_BUFFER_SIZE="2000", BOUND=bound)
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    batches = place.spans()

    assert sorted(batch.rank for batch in batches) == [0, 1]
    for batch in batches:
        seen = list(described(batch))
        recorded = json.loads((place.folder / f"rank{batch.rank}.json").read_text())
        by_nccl = [(RECORDER_S_NAMES.get(name, name), number) for number, name in recorded]
        assert [(name, number) for name, backend, number in seen if backend == "nccl"] == by_nccl
        assert [name for name, _, _ in seen] == CALLED
        assert {number for _, backend, number in seen if backend == "gloo"} == {0}
