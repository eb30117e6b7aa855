"""Who am I: whatever launcher started us, its variables say it."""

import pytest

from otel_dltrace.model.topology import World, job_from_env, world_from_env

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/none_y/attempt_2/1/error.json",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
BYTEPS = {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": "1", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "3"}
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto", "PET_RDZV_BACKEND": "c10d"}


@pytest.mark.parametrize(
    ("env", "world"),
    [
        pytest.param({}, World(), id="no launcher"),
        pytest.param(TORCHRUN, World(3, 4, 1, 1, 2, attempt=2, launcher="torchrun", start="29500.2"), id="torchrun"),
        pytest.param(
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"},
            World(3, 4, 1, 1, 4, attempt=2, launcher="torchrun", start="/tmp/torchelastic_x/none_y/attempt_2"),
            id="torchrun on one host",
        ),
        pytest.param({"RANK": "3", "WORLD_SIZE": "4"}, World(3, 4, launcher="torchrun"), id="rank and size alone"),
        pytest.param({"RANK": "3"}, World(), id="a rank without a size is no world"),
        pytest.param({**TORCHRUN, "RANK": ""}, World(), id="an empty variable is none"),
        pytest.param(KUBEFLOW, World(), id="Kubeflow's PET_* make no rank"),
        pytest.param(
            {**KUBEFLOW, **TORCHRUN},
            World(3, 4, 1, 1, 2, attempt=2, launcher="torchrun", start="29500.2"),
            id="torchrun in Kubeflow",
        ),
        pytest.param(
            {**KUBEFLOW, "PET_NPROC_PER_NODE": "8", "RANK": "1", "WORLD_SIZE": "2"},
            World(1, 2, 0, 1, 1, launcher="torchrun"),
            id="a Kubeflow pod without torchrun",
        ),
        pytest.param(OPEN_MPI, World(3, 4, 1, 0, 2, launcher="openmpi"), id="Open MPI"),
        pytest.param(
            {**OPEN_MPI, "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-a-1@1"},
            World(3, 4, 1, 0, 2, launcher="openmpi", job="prterun-a-1@1", run="prterun-a-1@1"),
            id="Open MPI 5",
        ),
        pytest.param(
            {**BATCH, **OPEN_MPI, "SLURM_NODEID": "1"},
            World(3, 4, 1, 1, 2, launcher="openmpi"),
            id="Open MPI in a Slurm allocation",
        ),
        pytest.param(
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            World(3, 4, 1, 0, 2, launcher="mpich"),
            id="MPICH",
        ),
        pytest.param(
            {"PMI_RANK": "3", "PMI_SIZE": "4", "I_MPI_HYDRA_UUID": "52430000-6de3"},
            World(3, 4, launcher="mpich", run="52430000-6de3", start="52430000-6de3"),
            id="Intel MPI",
        ),
        pytest.param(
            {"PMI_RANK": "0", "PMI_SIZE": "4", "I_MPI_HYDRA_UUID": "52430000-6de3", "PMI_SPAWNED": "1"},
            World(0, 4, launcher="mpich", start="52430000-6de3", is_spawned=True),
            id="Intel MPI, spawned: the id is its parents'",
        ),
        pytest.param(
            {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_SPAWNED": "1"},
            World(3, 4, launcher="mpich", is_spawned=True),
            id="MPICH, spawned",
        ),
        pytest.param(
            {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "5"}, World(3, 5, 1, 1, 3, launcher="mpich"), id="srun --mpi=pmi2"
        ),
        pytest.param(
            {"PMIX_RANK": "3", "PMIX_NAMESPACE": "ns"},
            World(3, 4, launcher="pmix", job="ns", run="ns"),
            id="PMIx tells no size",
        ),
        pytest.param(SRUN, World(3, 5, 1, 1, 3, launcher="slurm"), id="srun"),
        pytest.param(
            {**SRUN, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.7.0", "SLURM_JOB_ID": "7"},
            World(3, 5, 1, 1, 3, launcher="slurm", job="7.0", run="slurm.7.0"),
            id="srun --mpi=pmix",
        ),
        pytest.param(
            {**SRUN, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_RESTART_COUNT": "1"},
            World(3, 5, 1, 1, 3, launcher="slurm", job="slurm.pmix.7.0", run="slurm.pmix.7.0.1"),
            id="srun --mpi=pmix of a job that was requeued",
        ),
        pytest.param(
            {**SRUN, "SLURM_JOB_ID": "7"},
            World(3, 5, 1, 1, 3, launcher="slurm", job="7.0", run="slurm.7.0"),
            id="srun without PMIx",
        ),
        pytest.param(
            {**SRUN, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "PMI_RANK": "3", "PMI_SIZE": "5"},
            World(3, 5, 1, 1, 3, launcher="mpich", job="7.0", run="slurm.7.0.1"),
            id="srun --mpi=pmi2 of a job that was requeued",
        ),
        pytest.param(
            {**SRUN, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"},
            World(local_rank=1, local_world_size=2, launcher="slurm", job="7.0"),
            id="a single task, which may run several programs",
        ),
        pytest.param(
            {**SRUN, "SLURM_JOB_ID": "7", "PMI_RANK": "0", "PMI_SIZE": "5", "PMI_SPAWNED": "1"},
            World(0, 5, 1, 1, 3, launcher="mpich", job="7.0", is_spawned=True),
            id="MPICH, spawned in a step of Slurm's",
        ),
        pytest.param(
            {**SRUN, "SLURM_JOB_ID": "7", "PMI_RANK": "3", "PMI_SIZE": "5", "MPI_LOCALRANKID": "1"},
            World(3, 5, 1, 1, 3, launcher="mpich", job="7.0"),
            id="MPICH's mpiexec in a step of Slurm's, as another may be after it",
        ),
        pytest.param(
            {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-a-1@1", "SLURM_RESTART_COUNT": "1"},
            World(3, 4, 1, 0, 2, launcher="openmpi", job="prterun-a-1@1", run="prterun-a-1@1"),
            id="Open MPI's mpirun in one",
        ),
        pytest.param(BATCH, World(), id="a batch script is no task"),
        pytest.param(HOROVOD, World(3, 4, 1, 1, 2, launcher="horovod"), id="Horovod over Gloo"),
        pytest.param(
            {**HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711"},
            World(3, 4, 1, 1, 2, launcher="horovod", store="10.0.0.1:4711"),
            id="Horovod over Gloo, with its server",
        ),
        pytest.param({**OPEN_MPI, **HOROVOD}, World(3, 4, 1, 1, 2, launcher="horovod"), id="Horovod over MPI"),
        pytest.param(BYTEPS, World(1, 2, 0, 1, 1, servers=3, launcher="byteps"), id="BytePS"),
        pytest.param(
            {**BYTEPS, "BYTEPS_LOCAL_RANK": "3", "BYTEPS_LOCAL_SIZE": "4"},
            World(7, 8, 3, 1, 4, servers=3, launcher="byteps"),
            id="BytePS with several GPUs",
        ),
        pytest.param(
            {**KUBEFLOW, "RANK": "0", "WORLD_SIZE": "1", **BYTEPS},
            World(1, 2, 0, 1, 1, servers=3, launcher="byteps"),
            id="BytePS in a Kubeflow pod",
        ),
        pytest.param(
            {**KUBEFLOW, "RANK": "0", "WORLD_SIZE": "1", **HOROVOD},
            World(3, 4, 1, 1, 2, launcher="horovod"),
            id="Horovod in a Kubeflow pod",
        ),
        pytest.param(
            {**BYTEPS, **TORCHRUN},
            World(3, 4, 1, 1, 2, attempt=2, launcher="torchrun", start="29500.2"),
            id="torchrun in a job of BytePS",
        ),
        pytest.param(
            {"DMLC_WORKER_ID": "1", "DMLC_NUM_WORKER": "2"},
            World(1, 2, 0, 1, launcher="byteps"),
            id="BytePS without a role",
        ),
        pytest.param(
            {**BYTEPS, "DMLC_ROLE": "joint"}, World(1, 2, 0, 1, servers=3, launcher="byteps"), id="BytePS joint"
        ),
        pytest.param(
            {"DMLC_ROLE": "server", "DMLC_SERVER_ID": "2", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "3"},
            World(2, 2, role="server", servers=3, launcher="byteps"),
            id="BytePS server",
        ),
        pytest.param(
            {"DMLC_ROLE": "scheduler", "DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "3"},
            World(0, 2, role="scheduler", servers=3, launcher="byteps"),
            id="BytePS scheduler",
        ),
        pytest.param(
            {"RANK": "²", "WORLD_SIZE": " 4 ", "LOCAL_RANK": "-1"}, World(0, 4, launcher="torchrun"), id="no numbers"
        ),
        pytest.param(
            {"RANK": "9" * 20, "WORLD_SIZE": "9" * 5000, "LOCAL_RANK": "2147483647"},
            World(0, 1, 2147483647, launcher="torchrun"),
            id="numbers of which there are not so many",
        ),
    ],
)
def test_the_world_is_what_the_launcher_says(env, world):
    """Whoever started us, we know our rank and how many we are."""
    assert world_from_env(env) == world


@pytest.mark.parametrize(
    ("node", "tasks", "here"),
    [("0", "2(x3),1", 2), ("2", "2(x3),1", 2), ("3", "2(x3),1", 1), ("4", "2(x3),1", 2), ("0", "", 2), ("0", "x", 2)],
)
def test_slurm_says_how_many_tasks_each_node_has(node, tasks, here):
    """The list is run-length encoded; beyond it, the mean must do."""
    env = {**SRUN, "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": tasks}
    assert world_from_env(env).local_world_size == here


@pytest.mark.parametrize(
    ("env", "job"),
    [
        pytest.param({}, "", id="nothing"),
        pytest.param({"TORCHELASTIC_RUN_ID": "none"}, "", id="torchrun's default is no identity"),
        pytest.param({"TORCHELASTIC_RUN_ID": "night"}, "night", id="torchrun's run id"),
        pytest.param({"PMIX_NAMESPACE": "ns", "TORCHELASTIC_RUN_ID": "night"}, "ns", id="PMIx before torchrun"),
        pytest.param(
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "PMIX_NAMESPACE": "ns"}, "7.2", id="Slurm before PMIx"
        ),
        pytest.param({"SLURM_JOB_ID": "7"}, "7", id="a Slurm job without a step"),
        pytest.param({"JOB_UID": "uid", "SLURM_JOB_ID": "7"}, "uid", id="Kubernetes before Slurm"),
    ],
)
def test_the_job_is_the_first_that_exists(env, job):
    """Contract 1 gives the order."""
    assert job_from_env(env) == job
