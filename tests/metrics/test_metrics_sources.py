"""What is sampled: the host or the container, a process, GPUs; right numbers or no series."""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from otel_dltrace.export.metrics.container import Container, Cpu, Memory
from otel_dltrace.export.metrics.gpu import GpuSource, NoGpuError, open_gpus
from otel_dltrace.export.metrics.host import CpuAndMemory, Disks, Network
from otel_dltrace.export.metrics.process import ProcessSource
from otel_dltrace.export.metrics.rates import Shares
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import METRICS, attributes_of
from otel_dltrace.record import guard

GB = 1 << 30
HOST_MEMORY, HOST_CPUS = 64 * GB, 16


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write *files* below *root*."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def values(points: Any) -> dict[tuple[str, str], float]:
    """Return points by metric and the last of their attributes' values."""
    return {(p.metric, str([*attributes_of(p.attributes).values(), ""][0])): p.value for p in points}


UNIFIED = {
    "proc/self/cgroup": "0::/pod/box\n",
    "sys/fs/cgroup/pod/memory.max": f"{8 * GB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{6 * GB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 17\ninactive_file {2 * GB}\nfile {3 * GB}\n",
    "sys/fs/cgroup/pod/box/memory.max": "max\n",
    "sys/fs/cgroup/pod/box/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/pod/box/cpu.stat": "usage_usec 3500000\nuser_usec 3000000\nsystem_usec 500000\n",
    "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
    "sys/fs/cgroup/cpuset.cpus.effective": "0-15\n",
}
OLD = {
    "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:cpuset:/docker/abc\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GB}\n",
    "sys/fs/cgroup/memory/memory.stat": "cache 7\ntotal_inactive_file 4096\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "0-1,8\n",
    "sys/fs/cgroup/cpuacct/cpuacct.usage_user": "2000000000\n",
    "sys/fs/cgroup/cpuacct/cpuacct.usage_sys": "1000000000\n",
}
OLD_POD = {
    "proc/self/cgroup": "3:cpu,cpuacct:/pod/box\n",
    "sys/fs/cgroup/cpu/pod/box/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/pod/box/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpuacct/pod/box/cpuacct.usage_user": "1\n",
    "sys/fs/cgroup/cpuacct/pod/cpuacct.usage_user": "2000000000\n",
    "sys/fs/cgroup/cpuacct/pod/cpuacct.usage_sys": "1000000000\n",
}
OTHERS_COUNTED = {
    "sys/fs/cgroup/cpuacct/cpuacct.usage_user": "2000000000\n",
    "sys/fs/cgroup/cpuacct/cpuacct.usage_sys": "1000000000\n",
}
CPUSET_ALONE = OTHERS_COUNTED | {
    "proc/self/cgroup": "3:cpu,cpuacct:/\n2:cpuset:/box\n",
    "sys/fs/cgroup/cpuset/box/cpuset.effective_cpus": "4\n",
}
QUOTA_ALONE = OTHERS_COUNTED | {
    "proc/self/cgroup": "3:cpu:/box\n4:cpuacct:/\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
}
UNLIMITED = {
    "proc/self/cgroup": "0::/\n4:memory:/\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/cpu.max": "max 100000\n",
    "sys/fs/cgroup/cpuset.cpus.effective": "0-15\n",
}


@pytest.mark.parametrize(
    ("files", "memory", "cpu"),
    [
        pytest.param(UNIFIED, Memory(8 * GB, 6 * GB, 2 * GB), Cpu(2.5, 3.0, 0.5), id="v2, the pod's memory binds"),
        pytest.param(OLD, Memory(4 * GB, GB, 4096), Cpu(3, 2.0, 1.0), id="v1, a cpuset binds"),
        pytest.param(OLD_POD, None, Cpu(0.5, 2.0, 1.0), id="v1, the pod's quota binds"),
        pytest.param(CPUSET_ALONE, None, Cpu(1, None, None), id="v1, a cpuset binds, and more are counted together"),
        pytest.param(QUOTA_ALONE, None, Cpu(0.5, None, None), id="v1, a quota binds, and more are counted together"),
        pytest.param(UNLIMITED, None, None, id="no limit"),
        pytest.param({}, None, None, id="no cgroup to be seen"),
    ],
)
def test_a_container_is_as_large_as_its_tightest_limit(files, memory, cpu, tmp_path):
    """The limit of any folder above binds too, and usage is read where it does."""
    container = Container(HOST_MEMORY, HOST_CPUS, tree(tmp_path, files))

    assert (container.memory(), container.cpu()) == (memory, cpu)


def test_in_a_container_its_own_memory_and_cpus_are_what_is_used(tmp_path):
    """Of 2 CPUs half of one was used between the samples: a quarter; memory's states add up to the limit."""
    limits = {**UNIFIED, "sys/fs/cgroup/pod/memory.max": "1048576", "sys/fs/cgroup/pod/memory.current": "786432"}
    limits |= {"sys/fs/cgroup/pod/memory.stat": "inactive_file 262144\n"}
    limits |= {"sys/fs/cgroup/pod/box/cpu.max": "10000 1000000\n"}  # a hundredth of a CPU, on any host
    source = CpuAndMemory(tree(tmp_path, limits))
    [*source.sample()]
    found = values(source.sample())

    assert {key: value for key, value in found.items() if key[0] != m.SYSTEM_CPU_UTILIZATION} == {
        (m.SYSTEM_CPU_LOGICAL_COUNT, ""): 0.01,
        (m.SYSTEM_CPU_TIME, "user"): 3.0,
        (m.SYSTEM_CPU_TIME, "system"): 0.5,
        (m.SYSTEM_MEMORY_LIMIT, ""): 1048576,
        (m.SYSTEM_MEMORY_USAGE, "used"): 524288,
        (m.SYSTEM_MEMORY_USAGE, "cached"): 262144,
        (m.SYSTEM_MEMORY_USAGE, "free"): 262144,
        (m.SYSTEM_MEMORY_UTILIZATION, "used"): 0.5,
        (m.SYSTEM_MEMORY_UTILIZATION, "cached"): 0.25,
        (m.SYSTEM_MEMORY_UTILIZATION, "free"): 0.25,
    }
    assert [(mode, found[m.SYSTEM_CPU_UTILIZATION, mode]) for mode in ("user", "system", "idle")] == [
        ("user", 0.0),
        ("system", 0.0),
        ("idle", 1.0),
    ]


def test_what_others_use_as_well_is_no_container_s(tmp_path):
    """How many CPUs it has is known, and no series says what they do."""
    source = CpuAndMemory(tree(tmp_path, QUOTA_ALONE))
    [*source.sample()]

    assert {key: value for key, value in values(source.sample()).items() if key[0].startswith("system.cpu")} == {
        (m.SYSTEM_CPU_LOGICAL_COUNT, ""): 0.5
    }


def test_shares_are_of_all_cpus_and_never_below_nothing():
    """The first reading says nothing; the kernel's idle time may go back; a clock that stands gives no share."""
    shares = Shares()

    assert [
        shares.since_last(10.0, {"user": 1.0, "idle": 5.0}, 2),
        shares.since_last(11.0, {"user": 2.0, "idle": 4.9}, 2),
        shares.since_last(11.0, {"user": 3.0, "idle": 5.0}, 2),
    ] == [{}, {"user": 0.5, "idle": 0.0}, {}]


def test_the_host_is_as_psutil_sees_it(tmp_path):
    """What counts up lies between two readings of psutil's own; memory's states add up to all there is."""
    before = (psutil.cpu_times(), psutil.disk_io_counters(perdisk=True), psutil.net_io_counters(pernic=True))
    points = [p for source in (CpuAndMemory(tmp_path), Disks(), Network()) for p in source.sample()]
    after = (psutil.cpu_times(), psutil.disk_io_counters(perdisk=True), psutil.net_io_counters(pernic=True))
    memory = {attributes_of(p.attributes)[m.MEMORY_STATE]: p.value for p in points if p.metric == m.SYSTEM_MEMORY_USAGE}
    bounds = {
        (m.SYSTEM_CPU_TIME, "user"): ([x[0].user for x in (before, after)]),
        (m.SYSTEM_CPU_TIME, "system"): ([x[0].system for x in (before, after)]),
    }
    checked = 0
    for point in points:
        attributes = attributes_of(point.attributes)
        if point.metric in (m.SYSTEM_DISK_IO, m.SYSTEM_DISK_OPERATIONS):
            unit = "bytes" if point.metric == m.SYSTEM_DISK_IO else "count"
            name = f"{attributes[m.DISK_DIRECTION]}_{unit}"
            low, high = (getattr(x[1][attributes[m.DEVICE]], name) for x in (before, after))
        elif point.metric == m.SYSTEM_NETWORK_IO:
            name = {"transmit": "bytes_sent", "receive": "bytes_recv"}[attributes[m.NETWORK_DIRECTION]]
            low, high = (getattr(x[2][attributes[m.INTERFACE]], name) for x in (before, after))
        else:
            low, high = bounds.get((point.metric, attributes.get(m.CPU_MODE)), (point.value, point.value))
        assert low <= point.value <= high, point
        checked += 1

    assert checked == len(points)
    assert sum(memory.values()) == psutil.virtual_memory().total
    assert {p.metric for p in points} <= METRICS.keys()


def test_partitions_and_loop_devices_are_no_disks():
    """Their bytes would come twice."""
    names = {attributes_of(p.attributes)[m.DEVICE] for p in Disks().sample()}

    assert [
        name for name in names if name.startswith("loop") or Path("/sys/class/block", name, "partition").exists()
    ] == []


def test_a_process_is_as_proc_says_until_it_is_gone():
    """Its memory, threads and CPU time are psutil's; once it has ended there is nothing, not zero."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = psutil.Process(child.pid)
    while not known.num_ctx_switches().voluntary:  # it has begun, and waits
        pass
    source = ProcessSource(child.pid, 3, 2)
    points = [*source.sample()]
    found = values(points)
    seen = (known.memory_info().rss, known.num_threads(), known.cpu_times().user)
    again = values(source.sample())
    child.communicate(b"\n")

    assert (found[m.PROCESS_MEMORY_USAGE, ""] <= seen[0], found[m.PROCESS_THREAD_COUNT, ""]) == (True, seen[1])
    assert found[m.PROCESS_CPU_TIME, "user"] <= seen[2] <= again[m.PROCESS_CPU_TIME, "user"]
    assert {p.rank for p in points} == {3}
    assert {key for key in found if key[0] != m.PROCESS_DISK_IO} == {
        *((m.PROCESS_CPU_TIME, mode) for mode in ("user", "system")),
        (m.PROCESS_MEMORY_USAGE, ""),
        (m.PROCESS_THREAD_COUNT, ""),
        *((m.PROCESS_PAGING_FAULTS, kind) for kind in ("minor", "major")),
        *((m.PROCESS_CONTEXT_SWITCHES, kind) for kind in ("voluntary", "involuntary")),
    }
    assert [*source.sample()] == []


def test_a_server_says_that_it_is_one(tmp_path):
    """Its rank is another than the worker's of the same number; what a kernel does not tell is left out."""
    fields = ["S", *["0"] * 40]
    root = tree(tmp_path, {"5/stat": f"5 (a (b) c) {' '.join(fields)}\n", "5/status": "Name:\ta\nThreads:\t1\n"})
    points = [*ProcessSource(5, 0, 1, "server", root).sample()]

    assert {attributes_of(p.attributes)[s.DL_ROLE] for p in points} == {"server"}
    assert {p.metric for p in points} & {m.PROCESS_CONTEXT_SWITCHES, m.PROCESS_DISK_IO} == set()


def test_files_are_closed_with_the_source():
    """A drain serves many processes in its life."""
    before = psutil.Process().num_fds()
    source = ProcessSource(os.getpid(), 0, 1)
    unused = psutil.Process().num_fds() - before
    sampled = [*source.sample()]
    opened = psutil.Process().num_fds() - before
    source.close()

    assert (unused, bool(sampled), opened > 0) == (0, True, True)
    assert (psutil.Process().num_fds(), [*source.sample()]) == (before, [])


def test_a_file_that_fails_when_it_is_read_leaves_the_others(tmp_path):
    """``/proc/<pid>/io`` may be opened by those who may not read it: a folder, which is no better, stands for it."""
    root = tree(tmp_path, {"5/stat": f"5 (a) {' '.join(['S', *['0'] * 40])}\n"})
    (root / "5" / "io").mkdir()

    assert m.PROCESS_MEMORY_USAGE in {p.metric for p in ProcessSource(5, 0, 1, proc=root).sample()}


class NVMLError(Exception):
    """What ``pynvml`` raises."""

    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 9: "Driver Not Loaded", 15: "GPU is lost"}[value])
        self.value = value


class FakeNvml(types.ModuleType):
    """The part of ``pynvml`` that we use: two GPUs, of which the second one's driver tells of memory alone."""

    def __init__(self, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.asked: list[int] = []
        self.lost = False
        self.counted = {197: 1000, 198: 2000, 138: 3, 139: 0}
        self.NVMLError = NVMLError
        self.NVML_SUCCESS = self.NVML_TEMPERATURE_GPU = 0
        self.nvmlInit = (lambda: None) if driver else (lambda: fail(9))
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetUUID = lambda gpu: f"GPU-{gpu}" if gpu else b"GPU-0"
        self.nvmlDeviceGetName = lambda _gpu: "Fake"
        self.nvmlDeviceGetUtilizationRates = self._utilization
        self.nvmlDeviceGetMemoryInfo = lambda _gpu: types.SimpleNamespace(total=80 * GB, used=20 * GB, free=60 * GB)
        self.nvmlDeviceGetPowerUsage = lambda gpu: fail(3) if gpu else 345_600
        self.nvmlDeviceGetTotalEnergyConsumption = lambda gpu: fail(3) if gpu else 12_000
        self.nvmlDeviceGetTemperature = lambda gpu, _sensor: fail(3) if gpu else 61
        self.nvmlDeviceGetCurrentClocksThrottleReasons = lambda gpu: fail(3) if gpu else 0x1 | 0x4
        self.nvmlDeviceGetFieldValues = lambda gpu, fields: fail(3) if gpu else [self._field(n) for n, _ in fields]

    def _field(self, number: int) -> Any:
        """Return what a field has counted; what NVLink received is not supported."""
        value = types.SimpleNamespace(ullVal=self.counted[number])
        return types.SimpleNamespace(nvmlReturn=3 if number == 139 else 0, value=value)

    def _utilization(self, gpu: int) -> Any:
        self.asked.append(gpu)
        return fail(15 if self.lost else 3) if gpu or self.lost else types.SimpleNamespace(gpu=87)


def fail(value: int) -> Any:
    """Raise as NVML does."""
    raise NVMLError(value)


def of_gpu(points: list[Point], uuid: str) -> dict[tuple[str, str], float]:
    """Return the points of one GPU by metric and what tells them apart."""
    out = {}
    for point in points:
        attributes = attributes_of(point.attributes)
        assert (attributes.pop(m.HW_TYPE), attributes.pop(m.HW_NAME)) == ("gpu", "Fake")
        if attributes.pop(m.HW_ID) == uuid:
            out[point.metric, " ".join(map(str, attributes.values()))] = point.value
    return out


def test_a_gpu_is_told_as_far_as_its_driver_does():
    """Ratios, bytes, watts and degrees by uuid; what the driver does not support has no series and is asked once."""
    nvml = FakeNvml()
    source = GpuSource(nvml)
    first, second = [*source.sample()], [*source.sample()]

    reasons = "applications_clocks hw_slowdown sync_boost sw_thermal hw_thermal hw_power_brake"
    throttled = dict.fromkeys(reasons.split(), 0) | {"sw_power_cap": 1}
    assert first == second
    assert of_gpu(first, "GPU-0") == {
        (m.HW_GPU_UTILIZATION, "general"): 0.87,
        (m.HW_GPU_MEMORY_USAGE, ""): 20 * GB,
        (m.HW_GPU_MEMORY_LIMIT, ""): 80 * GB,
        (m.HW_GPU_MEMORY_UTILIZATION, ""): 0.25,
        (m.HW_POWER, ""): 345.6,
        (m.HW_ENERGY, ""): 12.0,
        (m.HW_TEMPERATURE, ""): 61,
        (m.HW_GPU_IO, "pcie transmit"): 1000,
        (m.HW_GPU_IO, "pcie receive"): 2000,
        (m.HW_GPU_IO, "nvlink transmit"): 3 * 1024,
        **{(m.DL_GPU_THROTTLED, reason): value for reason, value in throttled.items()},
    }
    assert [metric for metric, _ in of_gpu(first, "GPU-1")] == [
        m.HW_GPU_MEMORY_USAGE,
        m.HW_GPU_MEMORY_LIMIT,
        m.HW_GPU_MEMORY_UTILIZATION,
    ]
    assert nvml.asked == [0, 1, 0]


def test_a_gpu_that_fails_once_is_asked_again():
    """Not so one that cannot tell."""
    nvml = FakeNvml()
    source = GpuSource(nvml)
    nvml.lost = True
    without = [*source.sample()]
    nvml.lost = False

    assert [m.HW_GPU_UTILIZATION in {p.metric for p in points} for points in (without, [*source.sample()])] == [
        False,
        True,
    ]


def test_an_older_pynvml_tells_what_it_can():
    """A function that it lacks, as pynvml 8 lacks those for bytes over links, costs that value alone."""
    nvml = FakeNvml()
    del nvml.nvmlDeviceGetFieldValues

    assert {p.metric for p in [*GpuSource(FakeNvml()).sample()]} - {p.metric for p in [*GpuSource(nvml).sample()]} == {
        m.HW_GPU_IO
    }


def test_a_gpu_that_is_lost_from_the_begin_leaves_the_others(capsys, monkeypatch):
    """A sentence says which."""
    monkeypatch.setattr(guard, "_said", set())
    nvml = FakeNvml()
    nvml.nvmlDeviceGetHandleByIndex = lambda index: fail(15) if index == 0 else index
    points = [*GpuSource(nvml).sample()]

    assert {attributes_of(point.attributes)[m.HW_ID] for point in points} == {"GPU-1"}
    assert "GPU 0 is not sampled: NVML says 'GPU is lost'" in capsys.readouterr().err


def test_a_counter_of_pcie_that_begins_anew_goes_on():
    """They are narrow in some drivers; a total that falls would be a reset of the series."""
    nvml = FakeNvml()
    source = GpuSource(nvml)
    seen = []
    for value in (1000, 1500, 20, 30):
        nvml.counted[197] = value
        seen.append(of_gpu([*source.sample()], "GPU-0")[m.HW_GPU_IO, "pcie transmit"])

    assert seen == [1000, 1500, 1520, 1530]


@pytest.mark.parametrize(
    ("module", "device", "sentence"),
    [
        pytest.param(None, False, "", id="nothing there"),
        pytest.param(None, True, "there are GPUs, but no nvidia-ml-py to ask about them", id="no nvidia-ml-py"),
        pytest.param(FakeNvml(driver=False), True, "NVML says 'Driver Not Loaded'", id="no driver"),
    ],
)
def test_without_a_driver_there_is_a_sentence_and_no_series(module, device, sentence, monkeypatch, tmp_path):
    """It says what to install; where there is no GPU, nothing."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    if device:
        (tmp_path / "nvidiactl").touch()

    with pytest.raises(NoGpuError) as raised:
        open_gpus(tmp_path)
    assert (sentence in str(raised.value), bool(str(raised.value))) == (True, bool(sentence))


def test_our_own_process_has_the_disks_bytes_only_where_we_may_read_them():
    """``/proc/<pid>/io`` is for its owner: then both directions are there, else neither."""
    found = {key[1] for key in values(ProcessSource(os.getpid(), 0, 1).sample()) if key[0] == m.PROCESS_DISK_IO}

    assert found in ({"read", "write"}, set())
