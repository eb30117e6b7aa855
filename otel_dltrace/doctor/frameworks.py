"""Which frameworks are there, and what of each would be traced; they are imported in processes of their own."""

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from otel_dltrace.doctor.child import Child
from otel_dltrace.doctor.installation import version_of
from otel_dltrace.instrument._sites import Row, Site, applies, resolve
from otel_dltrace.instrument.registry import TABLES, Registry
from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding

AREA = "frameworks"
MOST = 4
"""So many are imported at a time: some take a gigabyte."""
_QUIET = {"OTEL_DLTRACE": "0", "BYTEPS_TRACE_ON": "0", "BYTEPS_SERVER_ENABLE_PROFILE": "0"}
_CODE = """
import json, sys
from otel_dltrace.doctor.frameworks import patched
answer = patched({names!r})
"""
_OWN = "otel_dltrace"
_DISTRIBUTIONS = {"opentelemetry": "opentelemetry-sdk"}


def check(*, import_them: bool = True) -> list[Finding]:
    """Return, for each framework that we trace, whether it is there, and what of it is put in place."""
    roots = {row.module.partition(".")[0] for rows in TABLES.values() for row in rows}
    packages = sorted(roots - {_OWN} - sys.stdlib_module_names)  # Python's own garbage collector is no framework
    there = [name for name in packages if find_spec(name) is not None]
    absent = [name for name in packages if name not in there]
    found = _frameworks(there, import_them)
    if absent:
        found.append(Finding(AREA, FINE, f"not installed: {', '.join(absent)}"))
    if not there:
        found.append(
            Finding(AREA, NOTE, "no framework that we trace is installed", "step() and phase() trace any loop")
        )
    return found


def _frameworks(names: Sequence[str], import_them: bool) -> list[Finding]:
    called = [f"{name} {version_of(_DISTRIBUTIONS.get(name, name))}".strip() for name in names]
    if not import_them:
        return [Finding(AREA, FINE, f"{name} is installed") for name in called]
    # Each takes seconds; most of them import one another, so that one that hangs holds up several.
    with ThreadPoolExecutor(MOST) as pool:
        children = pool.map(lambda name: Child.ask(_CODE.format(names=[name]), _QUIET), names)
        return [one for whom in zip(names, called, children, strict=True) for one in _framework(*whom)]


def _framework(name: str, called: str, child: Child) -> list[Finding]:
    if child.answer is None:
        what = f"{called} cannot be imported: {child.trouble}"
        return [Finding(AREA, PROBLEM, what, f"fix it first: {sys.executable} -c 'import {name}'")]
    broken = [
        line.removeprefix("otel_dltrace: ") for line in child.said.splitlines() if line.startswith("otel_dltrace: ")
    ]
    return [
        _judge(called, child.answer),
        *(Finding(AREA, PROBLEM, line, "please open an issue") for line in broken),
    ]


def _judge(called: str, answer: Mapping[str, Any]) -> Finding:
    placed, missing, absent = (answer[of] for of in ("placed", "missing", "absent"))
    if absent and not (placed or missing):
        what = f"{called} is not traced, since nothing that we trace in it can be imported: {answer['trouble']}"
        return Finding(AREA, NOTE, what, f"to have it traced, fix it first: {sys.executable} -c 'import {absent[0]}'")
    what = f"{called}: {len(placed)} of the {len(placed) + len(missing)} functions and hooks of our tables are in place"
    if absent:
        what += f"; without {', '.join(absent)}"
    if missing:
        what += f"; not there: {', '.join(missing)}"
    cure = "the rest is traced; this version is not one that we know" if missing else ""
    return Finding(AREA, NOTE if missing else FINE, what, cure)


def patched(packages: Sequence[str]) -> dict[str, Any]:
    """Import what we trace of *packages*, put our rows in place, and return which are, and which find nothing.

    Of modules that are ``absent`` the first one's ``trouble`` is told.

    For a process of its own.
    """
    if "mpi4py" in packages:
        import_module("mpi4py").rc.initialize = False  # no MPI begins here
    rows = [row for table in TABLES.values() for row in table if row.module.partition(".")[0] in packages]
    registry = Registry({"doctor": rows})
    registry.watch()
    troubles = {name: _trouble(name) for name in dict.fromkeys(row.module for row in rows)}
    rows = [row for row in rows if not isinstance(row, Site) or applies(row)]
    absent = [name for name in dict.fromkeys(row.module for row in rows) if troubles[name]]
    rows = [row for row in rows if not troubles[row.module]]
    traced = [_function(row) for row in rows]
    registry.unwatch()
    is_placed = [not isinstance(row, Site) or was is not _function(row) for row, was in zip(rows, traced, strict=True)]
    names = [f"{row.module}.{row.name}" if isinstance(row, Site) else f"{row.module} (hook)" for row in rows]
    return {
        "placed": [name for name, is_there in zip(names, is_placed, strict=True) if is_there],
        "missing": [name for name, is_there in zip(names, is_placed, strict=True) if not is_there],
        "absent": absent,
        "trouble": troubles[absent[0]] if absent else "",
    }


def _trouble(name: str) -> str:
    """Return why the module *name* cannot be imported, "" if it can."""
    try:
        import_module(name)
    except ImportError as error:
        return str(error) or "ImportError"
    return ""


def _function(row: Row) -> object:
    """Return what is now where *row* is to be, None where nothing is, or where that cannot be told."""
    found = resolve(sys.modules[row.module], row.name) if isinstance(row, Site) else None
    return found and found[2]
