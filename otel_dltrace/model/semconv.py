"""Every span name, attribute, queue type and activity that this project writes, once.

The names follow the OpenTelemetry naming rules; ``dl.*`` is what Megatron's and
NeMo's dashboards read too. None is a plain ``key``: collectors redact that one.
"""

from enum import IntEnum, IntFlag
from typing import Final


class Level(IntEnum):
    """How fine a record is; what is finer than the configured level is not recorded."""

    STEP = 1
    COLLECTIVE = 2
    PHASE = 3
    PARTITION = 4


class Source(IntEnum):
    """What the end of a span means (``dl.time.source``)."""

    HOST_DONE = 0
    HOST_ISSUE = 1
    DEVICE = 2
    RECORDER = 3
    BOUND = 4


PRECISE_NS: Final = 50_000
"""An end that is known this well is HOST_DONE, else BOUND: a thread is not woken faster."""
SOURCE_NAMES: Final = ("host_done", "host_issue", "device", "recorder", "bound")


class Flag(IntFlag):
    """The flags of a record."""

    ASYNC = 1
    ERROR = 2
    TRUNCATED = 4
    REMOTE = 8  # an AMEND says in which process's step and below which span of it
    DEVICE = 16  # an AMEND says when the device was at it
    OPEN = 32  # in no record: the process lives, and this is cut off where its drain saw it last


# Kinds of descriptors: they say how a record's fields are read (contract 2).
STEP: Final = "step"
STAGE: Final = "stage"
COLLECTIVE: Final = "collective"
P2P: Final = "p2p"
PHASE: Final = "phase"
TICK: Final = "tick"
METRIC: Final = "metric"

# Span names.
TRAIN_STEP: Final = "train.step"
RANK_STEP: Final = "rank.step"
WAIT: Final = "wait"
GC: Final = "gc"
EXIT: Final = "exit"
PUSH_PULL: Final = "push_pull"
COMM_HOOK: Final = "comm_hook"  # a bucket of DDP's that a hook of the program's reduces, however it does
ASYNC_PARAM: Final = "byteps.AsyncParam."  # how tensors begin whose push_pulls servers answer at once
PUSH: Final = "push"  # a request, as the server sees it; a worker's stage is the queue type PUSH
PULL: Final = "pull"
OTHER: Final = "other"

OPERATIONS_PER_TRACE: Final = 1000
"""Where there are no steps, so many operations of a group share a trace (contract 4)."""
TORCH_BACKENDS: Final = ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "fake")
MPI: Final = "mpi"
MPI_SETUP: Final = ("init", "finalize")
"""Calls of MPI in which nothing is communicated."""

# Stages.
DATALOADER_NEXT: Final = "dataloader_next"
PREPARE_BATCH: Final = "prepare_batch"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
STEP_LR_SCHEDULERS: Final = "step_lr_schedulers"
EVALUATE: Final = "evaluate"
TO_DEVICE: Final = "to_device"
FROM_DEVICE: Final = "from_device"
REDUCE_METRICS: Final = "reduce_metrics"
CHECKPOINT: Final = "checkpoint"
STAGES: Final = (
    DATALOADER_NEXT,
    PREPARE_BATCH,
    FORWARD,
    BACKWARD,
    OPTIMIZER,
    STEP_LR_SCHEDULERS,
    EVALUATE,
    TO_DEVICE,
    FROM_DEVICE,
    REDUCE_METRICS,
    CHECKPOINT,
)
DEVICE_STAGES: Final = (TO_DEVICE, FORWARD, BACKWARD, OPTIMIZER, FROM_DEVICE)
"""Those that a device does: where there is one, their times are its own. The others are the host's doing."""

# Resource attributes.
SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
HOST_NAME: Final = "host.name"
HOST_ID: Final = "host.id"
PROCESS_PID: Final = "process.pid"
DL_JOB_ID: Final = "dl.job.id"
DL_JOB_NAME: Final = "dl.job.name"
DL_JOB_GENERATION: Final = "dl.job.generation"
DL_JOB_ATTEMPT: Final = "dl.job.attempt"
DL_WORLD: Final = "dl.world"
DL_RANK: Final = "dl.rank"
DL_LOCAL_RANK: Final = "dl.local_rank"
DL_NODE_RANK: Final = "dl.node_rank"
DL_WORLD_SIZE: Final = "dl.world_size"
DL_LAUNCHER_TRACE_ID: Final = "dl.launcher.trace_id"
DL_LAUNCHER_SPAN_ID: Final = "dl.launcher.span_id"
DL_CLOCK_UNCERTAINTY: Final = "dl.clock.uncertainty"
DL_ROLE: Final = "dl.role"

# Span attributes.
DL_STEP: Final = "dl.step"
DL_STEP_USER: Final = "dl.step.user"
DL_EPOCH: Final = "dl.epoch"
DL_BATCH_SIZE: Final = "dl.batch_size"
DL_PHASE: Final = "dl.phase"
DL_COMM_OPERATION: Final = "dl.comm.operation"
DL_COMM_BACKEND: Final = "dl.comm.backend"
DL_COMM_GROUP_ID: Final = "dl.comm.group.id"
DL_COMM_GROUP_SIZE: Final = "dl.comm.group.size"
DL_COMM_SEQ: Final = "dl.comm.seq"
DL_COMM_COLLECTIVE_ID: Final = "dl.comm.collective_id"
DL_COMM_SIZE: Final = "dl.comm.size"
DL_COMM_DTYPE: Final = "dl.comm.dtype"
DL_COMM_ASYNC: Final = "dl.comm.async"
DL_COMM_PEER_RANK: Final = "dl.comm.peer.rank"
DL_COMM_ROOT: Final = "dl.comm.root"
DL_COMM_TAG: Final = "dl.comm.tag"
DL_TENSOR_NAME: Final = "dl.tensor.name"
DL_KEY: Final = "dl.key"
DL_PARTITION: Final = "dl.partition"
DL_QUEUE_TYPE: Final = "dl.queue.type"
DL_QUEUE_WAIT: Final = "dl.queue.wait"
DL_ACTIVITY: Final = "dl.activity"
DL_STAGE_COUNT: Final = "dl.stage.count"
DL_STAGE_TOTAL: Final = "dl.stage.total"
DL_SPANS_LEFT_OUT: Final = "dl.spans.left_out"
DL_SPAN_TRUNCATED: Final = "dl.span.truncated"
DL_TIME_SOURCE: Final = "dl.time.source"
DL_TIME_RESIDUAL: Final = "dl.time.residual"
CPYTHON_GC_GENERATION: Final = "cpython.gc.generation"
ERROR_TYPE: Final = "error.type"
