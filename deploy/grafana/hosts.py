"""What the machines do meanwhile: hosts and GPUs as the drain sees them, ranks, and nodes as the sidecar sees them."""

from panels import JOBS, OF_JOB, RANKS, Dashboard, Panel, rate

# Each drain tells of the whole host, and the collector shows what it told for some minutes more: so a host with two
# jobs, or with one that has just been started again, is as busy as either says, and not as both together. (The drain is
# the `instance`, or the `exported_instance` where Prometheus keeps that label for the collector that it asks.)
# The sidecar's collector calls itself the service "node"; its metrics have the names of the drain's, and other labels.
OF_HOST = 'host_name=~"$host",service_name!="node"'
OF_NODE = 'host_name=~"$host",service_name="node"'
HOST, GPU = "{{host_name}}", "{{host_name}} {{hw_id}}"
DRAIN = "host_name, instance, exported_instance"
# Parameter servers have processes, too, and are numbered by themselves; workers have no role there.
PROCESS, BY_PROCESS = "{{service_name}} {{dl_role}} rank {{dl_rank}}", f"{RANKS}, dl_role"


def _host(metric: str, where: str = "", of: str = OF_HOST) -> dict[str, str]:
    return {HOST: f"max by (host_name) (sum by ({DRAIN}) ({metric}{{{of}{where}}}))"}


def _directions(counter: str, label: str, of: str = OF_HOST) -> dict[str, str]:
    each = rate(counter, of, f"{DRAIN}, {label}")
    return {f"{HOST} {{{{{label}}}}}": f"max by (host_name, {label}) ({each})"}


def _gpu(metric: str) -> dict[str, str]:
    return {GPU: f"max by (host_name, hw_id) ({metric}{{{OF_HOST}}})"}


def _rank(metric: str) -> dict[str, str]:
    return {PROCESS: f"max by ({BY_PROCESS}) (sum by ({BY_PROCESS}, {DRAIN}) ({metric}{{{OF_JOB}}}))"}


HOSTS = (
    Panel(
        "CPU",
        "Share of all CPUs that is busy.",
        _host("system_cpu_utilization_ratio", ',cpu_mode!~"|idle|iowait"'),
        "percentunit",
    ),
    Panel(
        "Memory in use",
        "Of the host, or of the container that limits us.",
        _host("system_memory_utilization_ratio", ',system_memory_state="used"'),
        "percentunit",
    ),
    Panel("Disks", "A second.", _directions("system_disk_io_bytes_total", "disk_io_direction"), "Bps"),
    Panel("Disk operations", "A second.", _directions("system_disk_operations_total", "disk_io_direction"), "iops"),
    Panel("Network", "A second.", _directions("system_network_io_bytes_total", "network_io_direction"), "Bps"),
)
GPUS = (
    Panel("GPU", "Share of the time in which a kernel ran.", _gpu("hw_gpu_utilization_ratio"), "percentunit"),
    Panel("GPU memory in use", "Share of it.", _gpu("hw_gpu_memory_utilization_ratio"), "percentunit"),
    Panel("GPU power", "What it draws.", _gpu("hw_power_watts"), "watt"),
    Panel("GPU temperature", "What it measures itself.", _gpu("hw_temperature_celsius"), "celsius"),
    Panel(
        "GPU throttled",
        "1 while it is slowed down for this reason.",
        {
            GPU + " {{dl_gpu_throttle_reason}}": (
                f"max by (host_name, hw_id, dl_gpu_throttle_reason) (dl_gpu_throttled_ratio{{{OF_HOST}}})"
            )
        },
        "short",
    ),
    Panel(
        "PCIe and NVLink",
        "A second.",
        {
            GPU + " {{dl_gpu_link}} {{network_io_direction}}": (
                "max by (host_name, hw_id, dl_gpu_link, network_io_direction) "
                f"(rate(hw_gpu_io_bytes_total{{{OF_HOST}}}[$__rate_interval]))"
            )
        },
        "Bps",
    ),
)
PROCESSES = (
    Panel("Memory of ranks", "Resident.", _rank("process_memory_usage_bytes"), "bytes"),
    Panel("CPU of ranks", "Share of all CPUs of the host.", _rank("process_cpu_utilization_ratio"), "percentunit"),
    Panel(
        "Garbage collection",
        "Share of the time in which it held the interpreter.",
        {PROCESS: rate("dl_gc_pause_seconds_sum", OF_JOB, BY_PROCESS)},
        "percentunit",
    ),
)
NODES = (
    Panel(
        "CPU of nodes",
        "Share of all CPUs that is busy.",
        _host("system_cpu_utilization_ratio", ',state!~"idle|wait"', OF_NODE),
        "percentunit",
    ),
    Panel(
        "Memory of nodes",
        "Share in use.",
        _host("system_memory_utilization_ratio", ',state="used"', OF_NODE),
        "percentunit",
    ),
    Panel("Network of nodes", "A second.", _directions("system_network_io_bytes_total", "direction", OF_NODE), "Bps"),
    Panel("Load of nodes", "Threads that run or want to.", _host("system_cpu_load_average_1m", of=OF_NODE), "short"),
)

MACHINES = Dashboard(
    "hosts",
    "Hosts and GPUs",
    {"host": "label_values(system_cpu_utilization_ratio, host_name)", **JOBS},
    {"Hosts": HOSTS, "GPUs": GPUS, "Ranks": PROCESSES, "Nodes (with sidecar.yaml)": NODES},
)
