"""Who am I: rank and world from the variables of every launcher, given as a mapping."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

Env = Mapping[str, str]
TORCHRUN = "torchrun"
MPICH = "mpich"

_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_MANY_NODES = 1 << 17
_OF_HYDRA = "MPI_LOCALRANKID"
"""What MPICH's and Intel's own mpiexec sets, and Slurm does not."""
_MOST, _DIGITS = (1 << 31) - 1, 64
"""The largest number, and how many digits are read: Python refuses 4,300."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place, as its launcher says; a process without launcher is 0 of 1.

    *store* is ``host:port`` of a server of the launcher's that keeps what ranks tell each other, "" for none; where it
    *is_elastic*, ranks may come later. A world that *is_spawned* was begun by the ranks of another one, and has none of
    them; only MPICH and Intel MPI say so. *start* is what all ranks have that were started together, and those of
    another start have not; only torchrun and Intel MPI say so.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    local_world_size: int = 1
    role: str = "worker"
    servers: int = 0
    attempt: int = 0
    launcher: str = ""
    job: str = ""
    run: str = ""
    store: str = ""
    is_elastic: bool = False
    is_spawned: bool = False
    start: str = ""


def _number(env: Env, *names: str, default: int = 0) -> int:
    """Return the first of *names* that holds a whole number which a record can hold."""
    for name in names:
        # Not isdigit: it holds for "²", which int() refuses.
        text = env.get(name, "").strip()
        if text.isdecimal() and len(text) <= _DIGITS and int(text) <= _MOST:
            return int(text)
    return default


def _torchrun(env: Env) -> World:
    return World(
        _number(env, "RANK"),
        _number(env, "WORLD_SIZE", default=1),
        _number(env, "LOCAL_RANK"),
        _number(env, "GROUP_RANK", "PET_NODE_RANK"),
        # Never PET_NPROC_PER_NODE: it tells a torchrun what to start, and may be there without one.
        _number(env, "LOCAL_WORLD_SIZE", default=1),
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT"),
        launcher=TORCHRUN,
        start=_torchrun_start(env),
    )


def _torchrun_start(env: Env) -> str:
    """Return what tells one start of the ranks from another: on one host the folder of their error files."""
    folder = PurePosixPath(env.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE") and folder.name:
        return str(folder)
    return f"{env.get('MASTER_PORT', '')}.{env.get('TORCHELASTIC_RESTART_COUNT', '')}".strip(".")


def _byteps(env: Env) -> World:
    """BytePS: one worker is a machine, its GPUs are local ranks; servers are counted apart."""
    local_size = _number(env, "BYTEPS_LOCAL_SIZE", default=1)
    worker, local = _number(env, "DMLC_WORKER_ID"), _number(env, "BYTEPS_LOCAL_RANK")
    role = env.get("DMLC_ROLE", "worker")
    if role == "joint":
        role = "worker"
    if role == "worker":
        rank = _number(env, "BYTEPS_GLOBAL_RANK", default=worker * local_size + local)
    else:
        rank = _number(env, "DMLC_SERVER_ID", "DMLC_RANK")
    return World(
        rank,
        max(1, _number(env, "DMLC_NUM_WORKER", default=1)) * local_size,
        local,
        worker,
        local_size,
        role,
        _number(env, "DMLC_NUM_SERVER"),
        launcher="byteps",
    )


def _horovod(env: Env) -> World:
    return World(
        _number(env, "HOROVOD_RANK"),
        _number(env, "HOROVOD_SIZE", default=1),
        _number(env, "HOROVOD_LOCAL_RANK"),
        _number(env, "HOROVOD_CROSS_RANK"),
        _number(env, "HOROVOD_LOCAL_SIZE", default=1),
        launcher="horovod",
        store=_horovod_store(env),
        is_elastic=bool(env.get("HOROVOD_ELASTIC")),
    )


def _horovod_store(env: Env) -> str:
    """Return ``host:port`` of the server through which ranks over Gloo find each other, "" for none."""
    address, port = (env.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT"))
    return f"{address}:{port}" if address and port.isdecimal() else ""


def _open_mpi(env: Env) -> World:
    return World(
        _number(env, "OMPI_COMM_WORLD_RANK"),
        _number(env, "OMPI_COMM_WORLD_SIZE", default=1),
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        # OMPI_COMM_WORLD_NODE_RANK is a rank within the node, not the node's own.
        _number(env, "SLURM_NODEID"),
        _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", default=1),
        launcher="openmpi",
    )


def _slurm(env: Env) -> World:
    # Without srun a batch script's shell has SLURM_PROCID=0 and the allocation's SLURM_NTASKS.
    tasks = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
    nodes = max(1, _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1))
    return World(
        _number(env, "SLURM_PROCID"),
        tasks,
        _number(env, "SLURM_LOCALID"),
        _number(env, "SLURM_NODEID"),
        _tasks_here(env) or max(1, tasks // nodes),
        launcher="slurm",
    )


def _tasks_here(env: Env) -> int:
    """Return this node's entry of a list like ``2(x3),1``, 0 if there is none."""
    counts: list[int] = []
    for tasks, times in _TASKS.findall(env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(tasks)] * min(int(times or 1), _MANY_NODES)
    node = _number(env, "SLURM_NODEID")
    return counts[node] if node < len(counts) else 0


def _pmi(env: Env) -> World:
    return World(
        _number(env, "PMI_RANK"),
        _number(env, "PMI_SIZE", default=1),
        # Hydra's, Cray's, and Slurm's own, whose srun --mpi=pmi2 sets PMI_RANK alone.
        _number(env, _OF_HYDRA, "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        _number(env, "SLURM_NODEID"),
        _number(env, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE") or _tasks_here(env) or 1,
        launcher=MPICH,
        is_spawned=bool(_number(env, "PMI_SPAWNED")),
        start=env.get("I_MPI_HYDRA_UUID", ""),
    )


def _pmix(env: Env) -> World:
    # PMIx tells the size to MPI_Init, not to the environment: until then the world is as large as we know.
    rank = _number(env, "PMIX_RANK")
    return World(rank, max(_number(env, "PMIX_SIZE"), rank + 1), launcher="pmix")


# The first launcher whose variables are there speaks: the innermost one comes first, since
# horovodrun starts ranks through mpirun, and mpirun may itself run inside a Slurm allocation.
# RANK alone may be a pod's, as Kubeflow numbers them, in which another launcher has started several.
LAUNCHERS: tuple[tuple[tuple[str, ...], Callable[[Env], World]], ...] = (
    (("RANK", "WORLD_SIZE", "LOCAL_RANK"), _torchrun),
    (("HOROVOD_RANK", "HOROVOD_SIZE"), _horovod),
    (("DMLC_ROLE",), _byteps),
    (("DMLC_WORKER_ID", "DMLC_NUM_WORKER"), _byteps),
    (("RANK", "WORLD_SIZE"), _torchrun),
    (("OMPI_COMM_WORLD_RANK",), _open_mpi),
    (("PMI_RANK",), _pmi),
    (("SLURM_PROCID", "SLURM_STEP_ID"), _slurm),
    (("PMIX_RANK",), _pmix),
)


def world_from_env(env: Env) -> World:
    """Return who the launcher's variables in *env* say we are."""
    present = (read for needed, read in LAUNCHERS if all(env.get(name) for name in needed))
    read = next(present, None)
    world = read(env) if read else World()
    return replace(world, job=job_from_env(env), run=_run_from_env(world, env))


def _run_from_env(world: World, env: Env) -> str:
    """Return the id that PMIx gives this run, else Slurm or Intel MPI, "" for none.

    A job that is requeued has Slurm's again.
    """
    namespace = env.get("PMIX_NAMESPACE") or _common_start(world, env)
    # Only of Slurm's own ranks all have the count: mpirun's on other hosts get what mpirun passes on.
    restarts = env.get("SLURM_RESTART_COUNT", "") if namespace.startswith("slurm.") else ""
    return f"{namespace}.{restarts}".rstrip(".")


def _common_start(world: World, env: Env) -> str:
    """Return what Slurm or Intel MPI calls the start of the ranks of *world*, "" for nothing.

    A single one agrees with nobody, and those that are spawned have the variables of another world. What MPICH's own
    mpiexec starts within a step of Slurm's is not that step, for its next job may be within it, too.
    """
    if world.world_size < 2 or world.is_spawned:
        return ""
    is_step = world.launcher == "slurm" or (world.launcher == MPICH and _OF_HYDRA not in env)
    job, step = env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID")
    if is_step and job and step:
        return f"slurm.{job}.{step}"
    return world.start if world.launcher == MPICH else ""


def job_from_env(env: Env) -> str:
    """Return the id that the launcher gives this job, or "" (contract 1); one that the user gives goes before it."""
    for name in ("KUBERNETES_JOB_UID", "JOB_UID"):
        if env.get(name):
            return env[name]
    if env.get("SLURM_JOB_ID"):
        return f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}".rstrip(".")
    if env.get("PMIX_NAMESPACE"):
        return env["PMIX_NAMESPACE"]
    run = env.get("TORCHELASTIC_RUN_ID", "none")
    return "" if run == "none" else run
