"""The adapter for Horovod, on one rank: every row is there, objects come back, errors pass, ends mean what they say."""

import textwrap
from pathlib import Path

import pytest

from otel_dltrace.instrument import horovod
from otel_dltrace.instrument._horovod.calls import CALLS, OPS, SETS
from otel_dltrace.instrument._sites import Site
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from tests.support import torch_harness
from tests.support.processes import top_level

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(2400)  # the first test may have to build Horovod

SITES = [row for row in horovod.ROWS if isinstance(row, Site)]
FILES = {OPS: "horovod/torch/mpi_ops.py", SETS: "horovod/common/process_sets.py"}
ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}
ALONE |= {"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1", "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}


def parameters(site: Path, module: str) -> dict[str, list[str] | None]:
    """Return what is at the top of a module of Horovod."""
    return top_level((site / FILES[module]).read_text())


@pytest.mark.parametrize("row", SITES, ids=lambda row: row.name)
def test_every_row_is_there(horovod_site: Path, row: Site) -> None:
    """The function exists where the row says."""
    assert row.name in parameters(horovod_site, row.module)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.function)
def test_arguments_are_where_they_are_read(horovod_site: Path, call: object) -> None:
    """A call's parameters are those of the table, as far as it names them; two it calls by shorter names."""
    read = [{"received": "output_received_splits"}.get(name, name) for name in call.names]
    real = parameters(horovod_site, OPS)[call.function]
    short = [{"prescale_factor": "prescale", "postscale_factor": "postscale"}.get(name, name) for name in real]
    assert short[: len(read)] == read


def alone(folder: Path, site: Path, program: str, **variables: str) -> torch_harness.Recorded:
    """Return what one rank that runs *program* recorded, with more environment variables."""
    head = f"""
    import sys
    sys.path.insert(0, {str(site)!r})
    """
    [recorded] = torch_harness.run(folder, textwrap.dedent(head) + textwrap.dedent(program), **ALONE, **variables)
    return recorded


def test_ends_mean_what_they_say(tmp_path: Path, horovod_site: Path) -> None:
    """Blocked in `synchronize` is a child; done before is known to be so; polled is exact; never asked is issued."""
    recorded = alone(
        tmp_path,
        horovod_site,
        """
    import time, torch, horovod.torch as hvd
    hvd.init()
    hvd.allreduce(torch.ones(2), name="blocking")  # a cycle of Horovod begins behind it: what comes next lasts for one
    hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="waited"))
    handle = hvd.allreduce_async(torch.ones(2), name="early")
    bare = hvd.poll.__wrapped__
    while not bare(handle):
        time.sleep(0.001)
    time.sleep(0.01)
    hvd.synchronize(handle)
    hvd.grouped_allreduce_async([torch.ones(2), torch.ones(3)], name="lost")
    """,
        HOROVOD_CYCLE_TIME="300",
    )
    operations = {span.descriptor.tensor: span for span in recorded.spans(s.COLLECTIVE)}
    waits = {span.parent for span in recorded.spans(s.PHASE, s.WAIT)}

    assert {
        tensor: (span.size, s.Source(span.source), bool(span.flags & s.Flag.ASYNC))
        for tensor, span in operations.items()
    } == {
        "allreduce.waited": (8, s.Source.HOST_DONE, True),
        "allreduce.early": (8, s.Source.BOUND, True),
        "grouped_allreduce.lost_1of2": (8, s.Source.HOST_ISSUE, True),
        "grouped_allreduce.lost_2of2": (12, s.Source.HOST_ISSUE, True),
        "allreduce.blocking": (8, s.Source.HOST_DONE, False),
    }
    assert waits == {operations["allreduce.waited"].number}


def test_errors_of_horovod_pass(tmp_path: Path, horovod_site: Path) -> None:
    """The program gets the error it would get; the operation says its type, and shifts no number of another."""
    recorded = alone(
        tmp_path,
        horovod_site,
        """
    import torch, horovod.torch as hvd
    hvd.init()
    first = hvd.allreduce_async(torch.ones(1 << 20), name="twice")
    try:
        for _ in range(50):
            hvd.allreduce_async(torch.ones(1 << 20), name="twice")
            say(error="none")
    except Exception as error:
        say(error=type(error).__name__)
    hvd.synchronize(first)
    try:
        hvd.allreduce(torch.ones(4, 4).t()[:, ::2], name="strided")
    except ValueError as error:
        say(error=str(error))
    hvd.allreduce(torch.ones(4), name="strided")
    """,
    )
    numbers = [span.seq for span in recorded.spans(s.COLLECTIVE) if span.descriptor.tensor == "allreduce.strided"]
    assert recorded.said[-1] == {"error": "Tensor is required to be contiguous."}
    assert [kind for _, kind in recorded.errors][-1] == "ValueError"
    assert numbers == [0, 1]


def test_how_values_are_reduced_is_told_apart(tmp_path: Path, horovod_site: Path) -> None:
    """Also of tensors that nobody named, whose type alone is the same."""
    recorded = alone(
        tmp_path,
        horovod_site,
        """
    import torch, horovod.torch as hvd
    hvd.init()
    for op in (hvd.Sum, hvd.Adasum, hvd.Sum):
        try:
            hvd.allreduce(torch.ones(2), op=op)
        except hvd.HorovodInternalError:
            pass  # built without MPI it cannot
    """,
    )
    operations = [(span.descriptor.name, span.descriptor.tensor) for span in recorded.spans(s.COLLECTIVE)]
    assert operations == [(name, "allreduce.noname.N") for name in ("allreduce", "adasum", "allreduce")]


def test_names_without_end_grow_no_table(tmp_path: Path, horovod_site: Path) -> None:
    """Of a tensor that has a new name in every step there are some; then they are as unnamed ones."""
    recorded = alone(
        tmp_path,
        horovod_site,
        """
    import torch, horovod.torch as hvd
    from otel_dltrace.instrument._horovod import operations
    operations.MOST_NAMED = 3
    hvd.init()
    for step in range(6):
        hvd.allreduce(torch.ones(2), name="weight")
        hvd.allreduce(torch.ones(2), name=f"loss.{step}")
    """,
    )
    tensors = [span.descriptor.tensor.removeprefix("allreduce.") for span in recorded.spans(s.COLLECTIVE)]
    assert tensors[::2] == ["weight"] * 6
    assert tensors[1::2] == ["loss.0", "loss.1", *["noname.N"] * 4]
    numbers = [span.seq for span in recorded.spans(s.COLLECTIVE) if span.descriptor.tensor == "allreduce.noname.N"]
    assert len(set(numbers)) == 4


def test_horovod_is_traced_and_given_back(tmp_path: Path, horovod_site: Path) -> None:
    """Modules that had taken functions are traced as well; afterwards every object is the one it was."""
    recorded = alone(
        tmp_path,
        horovod_site,
        """
    registry.uninstrument()
    import torch, horovod.torch as hvd
    names = ["horovod.torch", *(f"horovod.torch.{n}" for n in ("mpi_ops", "functions", "optimizer", "sync_batch_norm"))]

    def objects():
        return {(m, n): value for m in names for n, value in vars(sys.modules[m]).items() if callable(value)}

    before = objects()
    hvd.init()
    hvd.allreduce(torch.ones(1), name="before")
    registry.instrument()
    changed = sum(before[key] is not value for key, value in objects().items())
    hvd.broadcast_parameters([("traced", torch.ones(1))], root_rank=0)
    registry.uninstrument()
    hvd.allreduce(torch.ones(1), name="after")
    after = objects()
    say(same=all(after[key] is value for key, value in before.items()), changed=changed > 30)
    """,
    )
    assert recorded.said == [{"same": True, "changed": True}]
    assert [span.descriptor.tensor for span in recorded.spans(s.COLLECTIVE)] == ["broadcast.traced"]


def test_each_start_of_horovod_is_a_generation(tmp_path: Path, horovod_site: Path) -> None:
    """After `shutdown` and `init` numbers begin anew, in a generation of their own: no id is there twice.

    Another `init` before that begins nothing, as in Horovod.
    """
    recorded = alone(
        tmp_path,
        horovod_site,
        """
    import torch, horovod.torch as hvd
    from otel_dltrace.model.identity import Bind
    recorder.home = {"bind": Bind("job", "1.0123456789abcdef").fields()}
    for _ in range(2):
        hvd.init()
        hvd.allreduce(torch.ones(1), name="a")
        hvd.init()
        hvd.allreduce(torch.ones(1), name="a")
        hvd.shutdown()
    """,
    )
    assert [(bind.job, bind.generation, bind.rank) for bind in recorded.binds] == [
        ("job", "1.0123456789abcdef", 0),
        ("job", "2.0123456789abcdef", 0),
    ]
    assert [span.seq for span in recorded.spans(s.COLLECTIVE)] == [1, 2, 1, 2]


def test_a_step_is_of_the_start_of_horovod_in_which_it_was_trained(tmp_path: Path, horovod_site: Path) -> None:
    """Also one that an error has ended; what comes between another `init` and the next step is in none."""
    recorded = alone(
        tmp_path,
        horovod_site,
        """
    import torch, horovod.torch as hvd
    from otel_dltrace.model.identity import Bind
    recorder.home = {"bind": Bind("job", "1.0123456789abcdef").fields()}
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for start in range(2):
        hvd.init()
        hvd.broadcast(torch.ones(1), 0, name="state")
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            hvd.allreduce(torch.ones(1), name="a")
            if (start, step) == (0, 1):
                break
            optimizer.step()
        hvd.shutdown()
    """,
    )
    operations = [(span.descriptor.tensor, span.step, span.seq) for span in recorded.spans(s.COLLECTIVE)]

    assert [bind.from_step for bind in recorded.binds] == [0, 2]
    assert operations == [
        *[("broadcast.state", NO_STEP, 1), ("allreduce.a", 0, 1), ("allreduce.a", 1, 2)],
        *[("broadcast.state", NO_STEP, 1), ("allreduce.a", 2, 1), ("allreduce.a", 3, 2)],
    ]
