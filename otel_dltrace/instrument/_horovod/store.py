"""Agrees on a run through the server that horovodrun has for its ranks over Gloo, where the environment names none."""

import dataclasses
import json
import os
import uuid
from time import monotonic, sleep
from typing import Any

from otel_dltrace.instrument._sites import log
from otel_dltrace.model.identity import Bind
from otel_dltrace.record.tracer import Tracer

_PATH = "/otel_dltrace/run"
_TIMEOUT_S = 2.0
_PAUSE_S = 0.02
_STEP = "step"


def propose(tracer: Tracer) -> None:
    """Say, as rank 0 and before `hvd.init`, which run this is: when that is over on the others, they can read it."""
    here = tracer.environment
    if here.rank == 0 and _is_open(tracer):
        said = {"job": here.job or str(uuid.uuid4()), "generation": f"1.{os.urandom(8).hex()}"}
        _request(here.store, "PUT", json.dumps(said).encode())


def agreed(tracer: Tracer) -> Bind | None:
    """Return the bind of this rank, after `hvd.init`; None where there is no such server, or nothing was said."""
    said = _request(tracer.environment.store, "GET") if _is_open(tracer) else b""
    if not said:
        return None
    fields: dict[str, Any] = tracer.recorder.home.get("bind") or {}
    return Bind.read({**fields, **json.loads(said)})


def tell(tracer: Tracer, bind: Bind) -> None:
    """Say, as rank 0 of an elastic job and after `hvd.init`, which run this is now, and at which step."""
    said = {"job": bind.job, "generation": bind.generation, _STEP: tracer.steps.upcoming}
    _request(tracer.environment.store, "PUT", json.dumps(said).encode())


def told(tracer: Tracer) -> Bind | None:
    """Return the bind that rank 0 tells, and go on from its step: who joins an elastic job later knows neither."""
    until = monotonic() + _TIMEOUT_S
    while not (answer := _request(tracer.environment.store, "GET")):
        if monotonic() > until:
            return None
        sleep(_PAUSE_S)
    said = json.loads(answer)
    tracer.steps.upcoming = max(tracer.steps.upcoming, said.get(_STEP, 0))
    return Bind.read({**(tracer.recorder.home.get("bind") or {}), **said})


def following(bind: Bind) -> Bind:
    """Return *bind* in the generation after it."""
    run = bind.generation.partition(".")[2]
    return dataclasses.replace(bind, generation=f"{bind.generation_number + 1}.{run}")


def _is_open(tracer: Tracer) -> bool:
    """Return whether there is a server to ask, and something that it has to say."""
    known = (tracer.recorder.home.get("bind") or {}).get("generation")
    return bool(tracer.environment.store) and tracer.recorder.bound is None and not known


def _request(address: str, method: str, body: bytes | None = None) -> bytes:
    """Return the answer of the server at *address*, nothing if there is none."""
    import http.client  # costs what nobody else at the start of a process has to pay

    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request(method, _PATH, body)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        log.debug("horovodrun's server at %s does not answer (%s); the environment decides", address, error)
        return b""
    finally:
        connection.close()
    return text if answer.status == http.client.OK else b""
