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
    semconv.HOST_ID: "the host's boot id: monotonic clocks are comparable within it",
    semconv.PROCESS_PID: "",
    semconv.DL_JOB_ID: "one training run; no other has it",
    semconv.DL_JOB_NAME: "",
    semconv.DL_JOB_GENERATION: "which start of the process group it is, from 1",
    semconv.DL_JOB_ATTEMPT: "the launcher's own count of restarts",
    semconv.DL_WORLD: "`default`, or the name given to `start(world=...)`",
    semconv.DL_RANK: "",
    semconv.DL_LOCAL_RANK: "",
    semconv.DL_NODE_RANK: "",
    semconv.DL_WORLD_SIZE: "",
    semconv.DL_LAUNCHER_TRACE_ID: "the trace of what launched the job, as `TRACEPARENT` in its environment says",
    semconv.DL_LAUNCHER_SPAN_ID: "that span; each step's root links to it",
    semconv.DL_ROLE: "worker, server or scheduler",
    semconv.DL_STEP: "the step's ordinal, from 0, never reset",
    semconv.DL_STEP_USER: "the number given to `step(number)`",
    semconv.DL_EPOCH: "",
    semconv.DL_BATCH_SIZE: "samples trained on: the batches' first tensors' first dimensions, or as it was told",
    semconv.DL_PHASE: "the stage",
    semconv.DL_COMM_OPERATION: "all_reduce, broadcast, push_pull, ...",
    semconv.DL_COMM_BACKEND: "gloo, nccl, mpi, ...",
    semconv.DL_COMM_GROUP_ID: "the process group's name",
    semconv.DL_COMM_GROUP_SIZE: "",
    semconv.DL_COMM_SEQ: "the operation's number in its group, alike on every rank; of a message: between its two "
    "ranks with its tag; absent where it is not certain",
    semconv.DL_COMM_COLLECTIVE_ID: "names one collective on every rank, one message on both its ranks",
    semconv.DL_COMM_SIZE: "bytes; 0 as well where an imported file says none, as BytePS's `comm.json`",
    semconv.DL_COMM_DTYPE: "",
    semconv.DL_COMM_ASYNC: "",
    semconv.DL_COMM_PEER_RANK: "the other side of a message, by its rank in the world; absent where it stayed unknown; "
    "of a ready tick of Horovod, who was ready, by its rank in the process set; on a server, whose request it answers",
    semconv.DL_COMM_ROOT: "by its rank in the world",
    semconv.DL_COMM_TAG: "of a message",
    semconv.DL_TENSOR_NAME: "",
    semconv.DL_KEY: r"declared key << 16 \| partition",
    semconv.DL_PARTITION: "",
    semconv.DL_QUEUE_TYPE: "",
    semconv.DL_QUEUE_WAIT: "microseconds",
    semconv.DL_ACTIVITY: "",
    semconv.DL_STAGE_COUNT: "how many pieces the stage had in this step",
    semconv.DL_STAGE_TOTAL: "ns in all pieces together, less the stages inside them",
    semconv.DL_SPANS_LEFT_OUT: "spans of this rank's step that were recorded and not sent",
    semconv.DL_SPAN_TRUNCATED: "the process died while the span was open",
    semconv.DL_TIME_SOURCE: "what the end means: `host_done` (the work was done), `host_issue` (only issued), "
    "`device`, `recorder` (PyTorch's Flight Recorder knows how long it took), `bound` (somewhere before)",
    semconv.DL_TIME_RESIDUAL: "ns, of a stage with the times of a `device`: how well its clock is tied to the host's",
    semconv.DL_CLOCK_UNCERTAINTY: "ns, of the pairing of monotonic and wall clock",
    semconv.CPYTHON_GC_GENERATION: "of a garbage collection",
    semconv.ERROR_TYPE: "the exception's class: of a call, a marked block, and the step that an uncaught one ended",
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

Generated by `make docs` from `otel_dltrace/instrument/_torch/calls.py`. Every row is checked against the installed
PyTorch, and what it records against PyTorch's Flight Recorder.

An operation is one span. It lasts until its work is done: until the call returns, until `wait()`, or until its future
says so when nobody waits; time blocked in `wait()` is a child span. `dl.time.source` says what the end means. A call
inside another one is no span of its own: an object collective is one span, with the bytes of the tensors that it is
made of and the number of the last of them. What a coalescing block notes down is one span when it is sent.
Collectives are counted by group, messages by group, source, destination and tag: all ranks know an operation by the
same `dl.comm.collective_id`. Of a group with several backends (`cpu:gloo,cuda:nccl`) PyTorch counts what
one of them does, NCCL where it is there; what the others do has no number. A rank outside of a group does nothing, and
has no span.

`isend`, `irecv` and `batch_isend_irecv` are the spans `isend` and `irecv`, one for each message. On Gloo nothing says
when a message that nobody waits for has gone: its span ends where it was launched, and says `host_issue`. A receive
from any rank learns its peer, its number and its id when it is done.

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

From `otel_dltrace/instrument/_mpi/calls.py`. Every row is checked against the installed mpi4py.

A span has the method's name in small letters; that of a persistent request has it without `_init`, and there is one
for each `Start`. A message each way (`Sendrecv`) is two spans, `send` and `recv`, or `isend` and `irecv`. A call that
returns a request lasts until the `Wait` or `Test` that completes it, which writes a child span `wait`; `bound` says
that it may have been done earlier. A request that nobody waits for ends where it was launched, and says `host_issue`.
`Iprobe` and its like, and `Win.Test`, are spans when they find something. MPI begins while `mpi4py.MPI` is imported:
the span `init` is that import, where there is more than one rank: Lightning imports it only to see whether there is.
It ends by itself after the interpreter has: `finalize` is a span where the program calls `Finalize`. `Abort` is no
span: before it ends the job, the step that is open, or `exit` outside any, has its code as an error, or the error that
the program is handling.

Bytes are those of the first buffer that the call gives: what a rank puts in, or takes where it puts nothing in; to and
from `PROC_NULL` none. A Python object has no size before it is pickled; its receive says how many bytes came.
Of a collective on files in two halves (`Write_all_begin`, `Write_all_end`) the first has the bytes.
`dl.comm.group.id` is `world`, `self.<rank>`, or a hash that the ranks of a communicator, window or file compute alike
from how it was made, without a message. What other processes than those of `COMM_WORLD` share (`Spawn`, `Accept`,
`Connect`) has no id, and so has a communicator that was made by other means than a method below. What is spawned is a
run of its own: one for all its ranks with Open MPI; with MPICH and Intel MPI, whose launcher has no name for it, one
for each. Persistent collectives are counted by their place among those made, `<group>.<n>`, calls of `Create_group`
among those who make that group. What a call failed to send, a collective with buffers whose arguments were refused, and
a receive that was cancelled, has no number. A receive from any rank or with any tag learns its message when it is done;
programs that let such receives compete with others for the same messages may get numbers that the sender does not. A
program that has a new tag for each message runs out of numbers after 131,072 of them in a communicator; one that makes
and frees communicators, windows, files or persistent collectives without end runs out of ids for new ones after some
thousands. One that begins MPI by a `Session` alone, not `Init`, is not traced. A program that uses torch's process
groups as well is one run, whichever begins first, where its ranks are the same for both.

The first collective of Python objects on a communicator duplicates it within mpi4py (4.1), which keeps the interpreter
to itself meanwhile. Where several threads do this at once, each on a communicator of its own, ranks can wait for each
other forever, traced or not; tracing changes when threads get there. Call one such collective on each communicator
before the threads begin.

| class | what it is | methods |
|---|---|---|
| | beginning and end | `Init`, `Init_thread`, `Finalize` |
{table}
"""


def _called(calls: list[torch_calls.Call]) -> str:
    names = []
    for call in calls:
        name = call.name.rpartition(".")[2]
        where = "ProcessGroup." if call.is_method else "_c10d_functional." if call.is_operator else ""
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
| `{semconv.TRAIN_STEP}` | the root: one per job and step, from worker rank 0's host, over its local ranks' extent |
| `{semconv.RANK_STEP}` | one rank's step |
| {stages} | a stage of a step; several pieces are one span with count and total |
| `all_reduce`, `broadcast`, `push_pull`, ... | an operation, from enqueue to done |
| `{semconv.GC}` | a garbage collection, where metrics are on: it holds up all threads of the process |
| `{semconv.EXIT}` | outside any step: the error that nobody caught and that ended the program |
| `{semconv.WAIT}`, `PUSH`, `PULL`, ... | a phase of an operation or of a step |

A step is a trace. Outside any step, in programs that have none, a trace is what is below one outermost `phase()`, named
by how often that name came on the rank, so that all ranks have the same; and below no phase, 1,000 operations of a
group. A `push_pull` outside any step is below no phase: a server knows it by its number alone. Such a trace, too,
stays within the budget (`OTEL_DLTRACE_SPAN_BUDGET`): each rank and server sends an equal share of it, the spans that
began first, which all ranks have; of what a server did the worker's stage above may then not be there. The run
directory has all of them, and its `drain.json` says how many did not go out.

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
