"""Children of `multiprocessing`: their recording ends as anybody's does, though the interpreter's end never comes."""

import pytest

from otel_dltrace.model.semconv import Flag
from tests.support.processes import Place, waiting

PROGRAM = """
    import multiprocessing, os, sys
    from pathlib import Path
    import otel_dltrace
    from otel_dltrace.record.tracer import live

    starts, method = sys.argv[1:]
    if starts == "program":
        otel_dltrace.start()

    def train():
        if starts == "child":
            otel_dltrace.start()
        for _ in range(3):
            live.tracer.steps.begin()  # as torch's loops do: each step ends where the next begins

    def idle():
        pass

    def rings_left_by(*targets):
        children = [multiprocessing.get_context(method).Process(target=target) for target in targets]
        for child in children:
            child.start()
        for child in children:
            child.join(240)
            assert child.exitcode == 0
        return len(list(Path(os.environ["OTEL_DLTRACE_RING_DIR"]).glob("*.ring")))

    def nest():
        rings_left_by(train)

    if __name__ == "__main__":
        print(rings_left_by(idle), rings_left_by(train, nest))
"""


def steps_of(place: Place) -> list[list[tuple[int, bool]]]:
    """Return for each process its steps, and whether each was cut off."""
    return [
        [
            (int(row["step"]), bool(row["flags"] & Flag.TRUNCATED))
            for row in batch.rows
            if batch.descriptors[row["descriptor"]].kind == "step"
        ]
        for batch in place.spans()
    ]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("starts", ["environment", "program", "child"])
def test_a_child_s_last_step_ends_with_it(place: Place, starts: str, method: str) -> None:
    """It is whole and its ring is read before the child is gone, a child's child's too; an idle one has no ring."""
    switch = {"OTEL_DLTRACE": "1"} if starts == "environment" else {}
    result = place.run(waiting(PROGRAM), starts, method, **switch)

    assert (result.returncode, result.stdout) == (0, "0 0\n"), result.stderr
    assert steps_of(place) == [[(0, False), (1, False), (2, False)]] * 2
    assert result.stderr.count("spans recorded, none lost") == 2


LOADING = """
    import multiprocessing
    import otel_dltrace

    def load():
        with otel_dltrace.phase("load"):
            pass

    otel_dltrace.start()
    for _ in range(3):
        with otel_dltrace.step():
            pass
    child = multiprocessing.get_context("fork").Process(target=load)
    child.start()
    child.join()
"""


def test_a_child_that_only_loads_data_has_nobody_wait_or_told(place: Place) -> None:
    """A DataLoader ends its workers at the end of each epoch: they leave their rings to the drain, which is quick."""
    result = place.run(waiting(LOADING))

    place.wait_for_rings()
    assert result.stderr.count("spans recorded") == 1
    assert sorted(len(batch) for batch in place.spans()) == [1, 3]


UNASKED = """
    import sys
    import otel_dltrace
    otel_dltrace.start()
    with otel_dltrace.step():
        pass
    otel_dltrace.stop()
    print("multiprocessing" in sys.modules)
"""


def test_multiprocessing_is_not_loaded_because_of_us(place: Place) -> None:
    """Most programs never fork."""
    assert place.run(UNASKED).stdout == "False\n"


TRAINED = """
    import torch
    import torch.multiprocessing
    from torch.utils.data import DataLoader

    def train(rank):
        torch.set_num_threads(1)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(torch.randn(12, 8), batch_size=4, num_workers=1):
            model(batch).sum().backward()
            optimizer.step()

    torch.multiprocessing.start_processes(train, nprocs=2, start_method="fork")
"""


def test_torch_s_children_end_the_last_step_of_their_loop(place: Place) -> None:
    """The workers of their DataLoaders, children themselves, record nothing."""
    pytest.importorskip("torch")
    result = place.run(waiting(TRAINED), OTEL_DLTRACE="1")

    assert result.returncode == 0, result.stderr
    assert steps_of(place) == [[(0, False), (1, False), (2, False)]] * 2


FORKED_WITHIN = """
    import torch
    import torch.multiprocessing

    model = torch.nn.Linear(8, 8)

    def train(rank=0, cycles=3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(cycles):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()

    torch.set_num_threads(1)
    train(cycles=1)
    model(torch.ones(4, 8))  # a step that is not over
    torch.multiprocessing.start_processes(train, nprocs=1, start_method="fork")
"""


def test_a_child_that_is_forked_within_a_step_begins_steps_of_its_own(place: Place) -> None:
    """Its first cycle is not the rest of its parent's, of which nobody would know when it ends."""
    pytest.importorskip("torch")
    result = place.run(FORKED_WITHIN, OTEL_DLTRACE="1")

    assert result.returncode == 0, result.stderr
    place.wait_for_rings()
    assert sorted(steps_of(place)) == [[(0, False), (1, False)], [(2, False), (3, False), (4, False)]]
