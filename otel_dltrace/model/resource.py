"""The attributes of the resource that say which job and which rank a process is."""

import uuid
from collections.abc import Mapping

from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import Bind

Attributes = Mapping[str, str | int | bool]
_INSTANCE_NAMESPACE = uuid.UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")  # semconv's, for derived ids


def job_attributes(bind: Bind) -> Attributes:
    """Return what *bind* says of the job and of this process's place in it."""
    return {
        s.SERVICE_NAME: bind.job_name,
        s.DL_JOB_ID: bind.job,
        s.DL_JOB_NAME: bind.job_name,
        s.DL_JOB_GENERATION: bind.generation_number,
        s.DL_JOB_ATTEMPT: bind.attempt,
        s.DL_WORLD: bind.world,
        s.DL_ROLE: bind.role,
        s.DL_RANK: bind.rank,
        s.DL_LOCAL_RANK: bind.local_rank,
        s.DL_NODE_RANK: bind.node_rank,
        s.DL_WORLD_SIZE: bind.world_size,
    }


def merge(job: Attributes, here: Attributes, told: Attributes, nonce: int) -> Attributes:
    """Return the resource of the process whose ring has *nonce*: what is known of its *job* and *here*, and was *told*.

    What an operator told holds, the service's name too; but not of the rank and the instance: it is said to all
    ranks of a container alike.
    """
    own = dict(job)
    name = own.pop(s.SERVICE_NAME, "otel_dltrace")
    return {s.SERVICE_NAME: name, **here, **told, **own, s.SERVICE_INSTANCE_ID: instance_id(nonce)}


def instance_id(nonce: int) -> str:
    """Return the ``service.instance.id`` of the process whose ring has *nonce*."""
    return str(uuid.uuid5(_INSTANCE_NAMESPACE, f"{nonce:016x}"))
