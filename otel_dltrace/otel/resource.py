"""Who this process is, for the resource of users' own providers: the same as ours, as far as it is known yet."""

import os

from opentelemetry.sdk.resources import Resource, ResourceDetector

from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.resource import Attributes, job_attributes, merge
from otel_dltrace.model.topology import World
from otel_dltrace.record.process_id import boot_id, process_nonce
from otel_dltrace.record.tracer import live
from otel_dltrace.settings.config import Config
from otel_dltrace.settings.hydra import own_world
from otel_dltrace.settings.process import environment_bind, is_alone, job_name_of, resource_of

_PLACE = (s.DL_RANK, s.DL_LOCAL_RANK, s.DL_NODE_RANK, s.DL_WORLD_SIZE, s.DL_ROLE)


class RankDetector(ResourceDetector):
    """Tells job, rank and host; asked again after a fork, since a child is another instance."""

    def detect(self) -> Resource:
        """Return the attributes that are known: all of them once the process is bound."""
        nonce = int.from_bytes(process_nonce(), "little")
        return Resource(merge(_job(), _here(), resource_of(os.environ), nonce))

    def is_process_dependent(self) -> bool:
        """Return that a forked child must ask again."""
        return True


def _job() -> Attributes:
    bound = live.tracer.recorder.bound if live.tracer is not None else None
    if bound is not None:
        return job_attributes(bound)
    world = own_world()
    bind, alone = _said(world)
    unknown = set() if world.launcher else set(_PLACE)  # a launcher itself, or ranks yet to be spawned
    if not bind.job:
        unknown.add(s.DL_JOB_ID)
    if not bind.generation or alone:
        unknown.add(s.DL_JOB_GENERATION)
    return {name: value for name, value in job_attributes(bind).items() if name not in unknown}


def _said(world: World) -> tuple[Bind, bool]:
    """Return who the environment says this process is, or the program that records; and whether it is alone there."""
    home = {} if live.tracer is None else live.tracer.recorder.home
    if "bind" in home:
        return Bind.read(home["bind"]), bool(home["alone"])
    config = Config.from_env()
    return environment_bind(config, world, job_name_of(os.environ)), is_alone(config, world, os.environ)


def _here() -> Attributes:
    host = os.uname().nodename
    return {s.HOST_NAME: host, s.HOST_ID: boot_id().hex() or host, s.PROCESS_PID: os.getpid()}
