"""Agrees on a run through the server that horovodrun has for its ranks over Gloo, where the environment names none."""

import json
import os
import uuid
from typing import Any

from otel_dltrace.instrument._sites import log
from otel_dltrace.model.identity import Bind
from otel_dltrace.record.tracer import Tracer

_PATH = "/otel_dltrace/run"
_TIMEOUT_S = 2.0


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
