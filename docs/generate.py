"""Write what follows from the code: tables of docs/ from model/ and instrument/, shell completion from the commands.

What several collectors' configurations share is put into each of them from collector-config/fragments/.
"""

import argparse
import re
import runpy
from pathlib import Path

import shtab

import otel_dltrace.cli
from otel_dltrace.cli.completion import SHELLS
from otel_dltrace.cli.main import make_parser
from otel_dltrace.instrument._mpi import calls as mpi_calls
from otel_dltrace.instrument._mpi.family import Call
from otel_dltrace.instrument._torch import calls as torch_calls
from otel_dltrace.model import metrics, semconv

HERE = Path(__file__).parent
COLLECTORS = HERE.parent / "collector-config"
MEANING = {
    semconv.SERVICE_NAME: "the job's name, the same on all ranks",
    semconv.SERVICE_INSTANCE_ID: "one per process, new after fork",
    semconv.HOST_NAME: "",
    semconv.HOST_ID: "the host's boot id; monotonic clocks can be compared within it",
    semconv.PROCESS_PID: "",
    semconv.DL_JOB_ID: "one job, over all its restarts; unique",
    semconv.DL_JOB_NAME: "",
    semconv.DL_JOB_GENERATION: "which start of the process group this is, from 1",
    semconv.DL_JOB_ATTEMPT: "the launcher's own count of restarts",
    semconv.DL_WORLD: "`default`, or the name given to `start(world=...)`",
    semconv.DL_RANK: "",
    semconv.DL_LOCAL_RANK: "",
    semconv.DL_NODE_RANK: "",
    semconv.DL_WORLD_SIZE: "",
    semconv.DL_LAUNCHER_TRACE_ID: "the trace of whatever launched the job, as `TRACEPARENT` in its environment says",
    semconv.DL_LAUNCHER_SPAN_ID: "the span in that trace; each step's root links to it",
    semconv.DL_ROLE: "worker, server or scheduler",
    semconv.DL_STEP: "the step's ordinal, from 0, never reset",
    semconv.DL_STEP_USER: "the number given to `step(number)`",
    semconv.DL_EPOCH: "",
    semconv.DL_BATCH_SIZE: "samples trained on: the first dimension of a batch's first tensor, or as the program says",
    semconv.DL_PHASE: "the stage",
    semconv.DL_COMM_OPERATION: "all_reduce, broadcast, push_pull, ...",
    semconv.DL_COMM_BACKEND: "gloo, nccl, mpi, ...",
    semconv.DL_COMM_GROUP_ID: "the process group, by its name",
    semconv.DL_COMM_GROUP_SIZE: "",
    semconv.DL_COMM_SEQ: "the operation's number in its group, the same on every rank; for a message, its number "
    "among those between its two ranks with its tag; absent if it is not certain",
    semconv.DL_COMM_COLLECTIVE_ID: "the same for one collective on every rank, or for one message on both its ranks",
    semconv.DL_COMM_SIZE: "bytes; also 0 if an imported file gives none, as BytePS's `comm.json`",
    semconv.DL_COMM_DTYPE: "",
    semconv.DL_COMM_ASYNC: "",
    semconv.DL_COMM_PEER_RANK: "for a message, the rank at the other end, by its number in the world; absent if it "
    "stayed unknown. For a ready tick of Horovod, the rank that was ready, by its number in the process set. On a "
    "server, the rank whose request is answered",
    semconv.DL_COMM_ROOT: "the root of a broadcast or reduce, by its rank in the world",
    semconv.DL_COMM_TAG: "the tag of a message",
    semconv.DL_TENSOR_NAME: "",
    semconv.DL_KEY: r"declared key << 16 \| partition",
    semconv.DL_PARTITION: "",
    semconv.DL_QUEUE_TYPE: "",
    semconv.DL_QUEUE_WAIT: "microseconds in the queue before this stage",
    semconv.DL_ACTIVITY: "",
    semconv.DL_STAGE_COUNT: "how many pieces the stage had in this step",
    semconv.DL_STAGE_TOTAL: "ns in all pieces together, without the stages inside them",
    semconv.DL_SPANS_LEFT_OUT: "spans of this rank's step that were recorded but not sent",
    semconv.DL_SPAN_TRUNCATED: "the process died while the span was open",
    semconv.DL_TIME_SOURCE: "what the end of the span means: `host_done` (the host saw that the work was done), "
    "`host_issue` (the work was only launched), `device` (done, by the device's clock), `recorder` (PyTorch's Flight "
    "Recorder says how long it took), `bound` (the work was done at some time before)",
    semconv.DL_TIME_RESIDUAL: "ns by which the times of a `device` may be off from the host's clock",
    semconv.DL_CLOCK_UNCERTAINTY: "ns by which the conversion of monotonic time to wall time may be off",
    semconv.CPYTHON_GC_GENERATION: "of a garbage collection",
    semconv.ERROR_TYPE: "the exception's class, on the call or marked block that raised it, or the step that an "
    "uncaught one ended",
}


def attribute_rows(first: str, last: str) -> str:
    """Return the table rows of the constants from *first* to *last*, in the order of the file."""
    names = [name for name in vars(semconv) if name.isupper()]
    chosen = names[names.index(first) : names.index(last) + 1]
    values = [getattr(semconv, name) for name in chosen]
    return "\n".join(f"| `{value}` | {MEANING[value]} |" for value in values if isinstance(value, str))


def completion(shell: str) -> str:
    """Return the completion of all commands for *shell*."""
    parser = make_parser()
    _complete_paths(parser)
    text = str(shtab.complete(parser, shell))
    # shtab has zsh take several run directories for one, and offer none after the first.
    return re.sub(r'^  "\(\*\)::?', '  "*:', text, flags=re.MULTILINE) if shell == "zsh" else text


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    runs, files = dict.fromkeys(("RUN", "RUN|JOB", "DIR"), shtab.DIRECTORY), ("FILE", "PATH", "-- PROGRAM ...")
    kinds = runs | dict.fromkeys(files, shtab.FILE)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command)
        elif action.metavar in kinds:
            action.complete = kinds[action.metavar]  # type: ignore[attr-defined]  # shtab's own


def with_fragments(text: str) -> str:
    """Return a collector's configuration with the fragments between their marks as they are in their files.

    So each file is whole: the Collector looks for ``${file:...}`` from where it is started, and a ConfigMap is flat.
    """

    def fill(mark: re.Match[str]) -> str:
        indent, name = mark[1], mark[2]
        lines = (COLLECTORS / "fragments" / name).read_text().splitlines(keepends=True)
        return f"{indent}# >>> fragments/{name}\n{''.join(indent + line for line in lines)}{indent}# <<<\n"

    return re.sub(r"^( *)# >>> fragments/(\S+)\n(?:.*\n)*?\1# <<<\n", fill, text, flags=re.MULTILINE)


def with_tables(text: str) -> str:
    """Return the page on metrics with the tables between their marks as `model.metrics` has them."""
    tables = {"seed": _seed_table(), "metrics": _metrics_table()}

    def fill(mark: re.Match[str]) -> str:
        return f"<!-- {mark[1]}: generated -->\n\n{tables[mark[1]]}\n\n<!-- end -->\n"

    return re.sub(r"^<!-- (\w+): generated -->\n(?:.*\n)*?<!-- end -->\n", fill, text, flags=re.MULTILINE)


def _metrics_table() -> str:
    rows = [
        f"| `{metric.name}` | `{metric.unit}` | {metric.instrument} | {metric.description} "
        f"| {', '.join(f'`{name}`' for name in metric.attributes)} |"
        for metric in metrics.METRICS.values()
    ]
    return "\n".join(["| metric | unit | instrument | what it is | attributes |", "|---|---|---|---|---|", *rows])


def _seed_table() -> str:
    rows = []
    for seed in metrics.SEED:
        of = "".join(f", `{name}` = `{value}`" for name, value in seed.of)
        rate = "its rate over time" if seed.rate else ""
        rows.append(f"| {seed.name} | `{seed.metric}`{of} | `{metrics.METRICS[seed.metric].unit}` | {rate} |")
    return "\n".join(["| Determined | here | unit | |", "|---|---|---|---|", *rows])


def calls_page() -> str:
    """Return the page on the calls of torch.distributed, from their table."""
    rows: dict[str, list[torch_calls.Call]] = {}
    for call in torch_calls.CALLS:
        rows.setdefault(call.span, []).append(call)
    table = "\n".join(f"| `{span}` | {_called(calls)} | {_size(calls[0])} |" for span, calls in rows.items())
    return f"""# The calls of torch.distributed

Which functions are traced, and what their spans hold. Generated by `make docs` from the tables in
`otel_dltrace/instrument/`. Every row is checked against the installed PyTorch, and what it records against PyTorch's
Flight Recorder.

- **One operation is one span**, which lasts until its work is done: until the call returns, until `wait()`, or, if
  nobody waits, until its future says so. Time blocked in `wait()` is a child span. `dl.time.source` says what the end
  means.
- **Nested calls.** A call inside another one has no span of its own. An object collective is one span, with the bytes
  of the tensors that it consists of, and the number of the last of them. A coalescing block is one span, when it is
  sent.
- **Numbers.** Collectives are counted by group, messages by group, source, destination and tag. So all ranks know an
  operation by the same `dl.comm.collective_id`. In a group with several backends (`cpu:gloo,cuda:nccl`) PyTorch counts
  only the operations of one of them, NCCL if it is there; the others' have no number. A rank that is not in the group
  does nothing, and has no span.
- **Messages.** `isend`, `irecv` and `batch_isend_irecv` are spans `isend` and `irecv`, one for each message. On Gloo
  nothing says when a message that nobody waits for has gone: its span ends where it was launched, and says
  `host_issue`. A receive from any rank learns its peer, its number and its id when it is done.

The last column says which argument the bytes are taken from.

| span | calls | bytes |
|---|---|---|
{table}

{_mpi_section()}"""


def _mpi_section() -> str:
    """Return the section on the calls of mpi4py, from their table."""
    rows: dict[tuple[str, str], list[Call]] = {}
    for family in mpi_calls.FAMILIES:
        rows.setdefault((family.holder, family.role.value), []).extend(family.methods())
    table = "\n".join(
        f"| `{holder}` | {role} | {', '.join(f'`{call.name}`' for call in calls)} |"
        for (holder, role), calls in rows.items()
    )
    return f"""# The calls of mpi4py

Generated from the tables in `otel_dltrace/instrument/`, too. Every row is checked against the installed mpi4py.

**Spans.** A span has the method's name in lower case; for a persistent request it is without `_init`, and there is one
span for each `Start`. A message each way (`Sendrecv`) is two spans, `send` and `recv`, or `isend` and `irecv`. A call
that returns a request lasts until the `Wait` or `Test` that completes it, which writes a child span `wait`; `bound`
says that it may have been done earlier. A request that nobody waits for ends where it was launched, and says
`host_issue`. `Iprobe` and its like, and `Win.Test`, are spans only if they find something.

**Beginning and end.** MPI begins while `mpi4py.MPI` is imported: the span `init` is that import. It is recorded only
if there is more than one rank, because Lightning imports it just to see whether there is. `finalize` is a span if the
program calls `Finalize`; otherwise MPI ends after the interpreter. `Abort` is no span. Before it ends the job, the
open step (or, outside any, `exit`) gets its code as an error, or the error that the program is handling.

**Bytes** are those of the first buffer that the call gives: what a rank puts in, or what it takes if it puts nothing
in; none to and from `PROC_NULL`. A Python object has no size before it is pickled; its receive says how many bytes
came. For a collective on files in two halves (`Write_all_begin`, `Write_all_end`) the first half has the bytes.

**Groups.** `dl.comm.group.id` is `world`, `self.<rank>`, or a hash. The ranks of a communicator, window or file all
compute the same hash from how it was made, without a message. There is no id for what is shared with processes outside
`COMM_WORLD` (`Spawn`, `Accept`, `Connect`), nor for a communicator that was made by other means than a method below.
Spawned processes are a run of their own: one for all of them with Open MPI, one for each with MPICH and Intel MPI,
whose launcher has no name for them. A program that also uses torch's process groups is one run, whichever begins
first, if its ranks are the same for both. A program that begins MPI only through a `Session`, without `Init`, is not
traced.

**Numbers.** Persistent collectives are counted by their place among those made, `<group>.<n>`, calls of `Create_group`
among those who make that group. There is no number for what a call failed to send, for a collective with buffers whose
arguments were refused, and for a receive that was cancelled. A receive from any rank or with any tag learns its message
when it is done; if such receives compete with others for the same messages, they may get numbers that the sender does
not have. A program that uses a new tag for each message runs out of numbers after 131,072 of them in a communicator.
One that keeps making and freeing communicators, windows, files or persistent collectives runs out of ids for new ones
after some thousands.

**A deadlock of mpi4py's own.** The first collective of Python objects on a communicator duplicates it within mpi4py
(4.1), which holds the interpreter meanwhile. If several threads do this at once, each on a communicator of its own,
ranks can wait for each other forever, traced or not; tracing only changes when threads get there. Call one such
collective on each communicator before the threads begin.

| class | what it is | methods |
|---|---|---|
| | beginning and end | `Init`, `Init_thread`, `Finalize` |
{table}
"""


def _called(calls: list[torch_calls.Call]) -> str:
    names = []
    for call in calls:
        name = call.name.rpartition(".")[2]
        where = ""
        if call.is_method:
            where = "ProcessGroup."
        elif call.is_operator:
            where = "_c10d_functional."
        since = f" (from {call.since} on)" if call.since else ""
        until = f" (before {call.until})" if call.until else ""
        names.append(f"`{where}{name}`{since}{until}")
    return ", ".join(names)


def _size(call: torch_calls.Call) -> str:
    if call.parts:
        return "all tensors it sends"
    if not call.tensors:
        return ""
    return f"`{call.tensors}`" + (" x ranks" if call.each else "")


def pages() -> dict[Path, str]:
    """Return what is generated, by file."""
    completions = Path(otel_dltrace.cli.__file__).parent / "completions"
    return {
        **{path: with_fragments(path.read_text()) for path in COLLECTORS.glob("*.yaml")},
        **{completions / shell: completion(shell) for shell in SHELLS},
        HERE / "operations.md": calls_page(),
        HERE / "metrics.md": with_tables((HERE / "metrics.md").read_text()),
        HERE / "spans.md": spans_page(),
    }


def spans_page() -> str:
    """Return docs/spans.md."""
    stages = ", ".join(f"`{name}`" for name in semconv.STAGES)
    return f"""# Spans and attributes

Generated by `make docs` from `otel_dltrace/model/semconv.py`.

| span | what it is |
|---|---|
| `{semconv.TRAIN_STEP}` | the root of a step's trace, sent from worker rank 0's host; it covers the ranks there |
| `{semconv.RANK_STEP}` | the step of one rank |
| {stages} | a stage of a step ([timings](timings.md)); all its pieces are one span, with their number and total |
| `all_reduce`, `broadcast`, `push_pull`, ... | a communication, from its call until it is done ([all](operations.md)) |
| `{semconv.WAIT}`, `PUSH`, `PULL`, ... | a phase of an operation or of a step |
| `{semconv.GC}` | a garbage collection, if metrics are on: it holds up all threads of the process |
| `{semconv.EXIT}` | outside any step: the error that nobody caught, and that ended the program |

A step is a trace. Spans outside any step, as in programs without steps, have other traces. What is below one outermost
`phase()` is one trace. It is named by how often a phase of that name came on the rank, so that all ranks have the
same. Below no phase, a trace is 1,000 operations of a group. A `push_pull` outside any step is in no phase's trace,
because a server knows it only by its number.

These traces, too, stay within the budget (`OTEL_DLTRACE_SPAN_BUDGET`). Each rank and server sends an equal share of it:
the spans that began first, which all ranks have. So the worker's stage above a server's span may be missing. The run
directory has all of them, and its `drain.json` says how many were not sent.

## Resource

| attribute | |
|---|---|
{attribute_rows("SERVICE_NAME", "DL_ROLE")}

## Span

| attribute | |
|---|---|
{attribute_rows("DL_STEP", "ERROR_TYPE")}
"""


def main() -> None:
    """Write the pages, the completions and the shared parts of configurations."""
    for path, text in pages().items():
        path.write_text(text)
    runpy.run_path(str(HERE.parent / "deploy" / "kubernetes" / "generate.py"))["write"]()  # from sidecar.yaml


if __name__ == "__main__":
    main()
