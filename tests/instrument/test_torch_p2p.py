"""Messages between ranks, in the world and in groups: both sides know which one it is, and collectives stay counted."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.instrument._torch import p2p
from otel_dltrace.instrument._torch.p2p import ANY, Ends, Messages
from otel_dltrace.model.attributes import collective_ids
from tests.support.paths import PROGRAMS
from tests.support.processes import a_place, attributes_of
from tests.support.torch_harness import Recorded, Span, run

pytest.importorskip("torch")

PROGRAM = (PROGRAMS / "messages.py").read_text()


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Four ranks that send to each other, some more than others."""
    return run(tmp_path_factory.mktemp("messages"), PROGRAM, 4, TORCH_FR_BUFFER_SIZE="2000")


def is_send(span: Span) -> bool:
    """Return whether *span* is the sending side of a message."""
    return "send" in span.name


def message(rank: int, span: Span) -> tuple[str, int, int, int, int]:
    """Return what identifies a message: group, source, destination, tag and number."""
    source, destination = (rank, span.a) if is_send(span) else (span.a, rank)
    return span.descriptor.group, source, destination, span.b, span.seq


def sides(sent: list[Recorded], *, sending: bool) -> dict[tuple[str, int, int, int, int], int]:
    """Return the bytes of each message as one side knows it."""
    return {
        message(rank, span): span.size
        for rank, recorded in enumerate(sent)
        for span in recorded.spans("p2p")
        if is_send(span) == sending
    }


def test_both_sides_name_a_message_alike(sent: list[Recorded]) -> None:
    """Group, source, destination, tag and number of what was sent are those of what was received, bytes too."""
    source = sides(sent, sending=True)
    assert source == sides(sent, sending=False)
    odd = next(name for name, ranks in sent[1].said[0]["groups"].items() if ranks == [1, 3])
    expected = {
        ("0", 0, 1, 1, 1): 4,
        ("0", 0, 1, 2, 1): 8,
        ("0", 0, 3, 0, 1): 12,
        ("0", 0, 3, 0, 2): 12,
        ("0", 0, 2, 7, 1): 16,
        ("0", 1, 2, 7, 1): 16,
        ("0", 3, 2, 8, 1): 16,
        (odd, 3, 1, 4, 1): 20,
        (odd, 3, 1, 4, 2): 20,
        **{("0", rank, (rank + 1) % 4, 0, 1): 24 for rank in range(4)},
        ("0", 0, 3, 9, 1): 28,
        ("0", 1, 2, 5, 1): 4,
        ("0", 2, 1, 5, 1): 4,
    }
    objects = {key: size for key, size in source.items() if key not in expected}
    assert list(objects) == [(odd, 3, 1, 0, 2)]  # the sizes come first, then the objects
    assert {key: size for key, size in source.items() if key in expected} == expected


def test_collectives_have_the_numbers_of_the_flight_recorder_between_messages(sent: list[Recorded]) -> None:
    """A rank's own messages do not move the numbers that the others count."""
    names = {"allreduce": "all_reduce"}
    for rank, recorded in enumerate(sent):
        seen = [(s.descriptor.group, s.seq, s.name) for s in recorded.spans("collective")]
        seen = [fields for fields in seen if fields[2] != "monitored_barrier"]
        made_of = {"reduce_scatter_single": "all_reduce"}
        assert len(seen) == len(recorded.said[0]["flown"])
        flown = [(group, seq, names.get(name, name)) for group, seq, name in recorded.said[0]["flown"]]
        if rank == 0:  # whose monitored barrier the Flight Recorder counts as six
            flown = [(g, seq - 4 if g == "0" and seq > 8 else seq, name) for g, seq, name in flown]
        assert [(g, seq, made_of.get(name, name)) for g, seq, name in seen] == flown


def test_all_ranks_of_a_group_agree_on_its_operations(sent: list[Recorded]) -> None:
    """In every group the same numbers, names and bytes on each of its ranks; none on a rank outside."""
    by_group: dict[str, list[list[tuple[int, str, int]]]] = {}
    for recorded in sent:
        here: dict[str, list[tuple[int, str, int]]] = {}
        for s in recorded.spans("collective"):
            here.setdefault(s.descriptor.group, []).append((s.seq, s.name, s.size))
        for group, operations in here.items():
            by_group.setdefault(group, []).append(operations)
    sizes = {group: len(ranks) for r in sent for group, ranks in r.said[0]["groups"].items()}
    assert {group: len(ranks) for group, ranks in by_group.items()} == {g: sizes[g] for g in by_group}
    assert all(operations == ranks[0] for ranks in by_group.values() for operations in ranks)
    assert Counter(sizes[group] for group in by_group) == {4: 1, 2: 1 + 2 + 4, 1: 1}


def test_a_message_is_over_when_it_was_waited_for(sent: list[Recorded]) -> None:
    """Ends are those of the work, or bounds; an operator that nobody waits for was issued."""
    sources = Counter((s.name, s.source) for r in sent for s in r.spans("p2p"))
    assert {source for (name, source) in sources if name in ("send", "recv")} == {0}
    assert {source for (_, source) in sources} <= {0, 1, 4}


def test_results_are_those_of_the_untraced_program(sent: list[Recorded], tmp_path: Path) -> None:
    """Every rank receives the same."""
    run(tmp_path, PROGRAM, 4, 0, TORCH_FR_BUFFER_SIZE="2000")
    for rank, recorded in enumerate(sent):
        assert recorded.said[0] == json.loads((tmp_path / f"rank{rank}.jsonl").read_text())


EVERYTHING = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
pair = dist.new_group([0, 1])
for group, tag in ((None, 0), (None, 3), (pair, 3), (pair, 3)):
    dist.send(torch.ones(2), 1, group, tag) if rank == 0 else dist.recv(torch.ones(2), None if tag else 0, group, tag)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_message_has_one_id_in_the_run_directory(tmp_path: Path) -> None:
    """The drain gives the send and its receive the same id, and says peer and tag."""
    with a_place(tmp_path) as place:
        result = place.torchrun(EVERYTHING, OTEL_DLTRACE="1")
        assert result.returncode == 0, result.stderr
        place.wait_for_rings()
        ids, ends = [], []
        for batch in sorted(place.spans(), key=lambda batch: batch.process.bind.rank):
            messages = np.flatnonzero(batch.is_kind("p2p"))
            attributes = attributes_of(batch.take(messages))
            ends.append([(a["dl.comm.peer.rank"], a["dl.comm.tag"], a["dl.comm.seq"]) for a in attributes])
            ids.append(collective_ids(batch)[messages].tolist())
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 4
    assert 0 not in ids[0]
    assert ends == [[(1 - rank, 0, 1), (1 - rank, 3, 1), (1 - rank, 3, 1), (1 - rank, 3, 2)] for rank in range(2)]


def test_messages_are_counted_by_both_ends_and_tag_and_anew_in_a_new_group() -> None:
    """The first is 1; a group that is destroyed gives its name to another."""
    messages = Messages()
    one, two = Ends("0", 1, 5, sends=True), Ends("1", 1, 5, sends=True)
    assert [messages.number(ends) for ends in (one, one, two, Ends("0", 1, 5, sends=False))] == [1, 2, 1, 1]
    messages.forget("0")
    assert [messages.number(one), messages.number(two)] == [1, 2]
    messages.forget()
    assert messages.number(two) == 1
    assert ANY < 0


def test_messages_that_each_have_a_tag_of_their_own_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are counted; further ones have no number, and those that are counted go on."""
    monkeypatch.setattr(p2p, "MOST_NUMBERED", 2)
    messages = Messages()
    assert [messages.number(Ends("0", 1, tag, sends=True)) for tag in (0, 1, 2, 3, 1)] == [1, 1, 0, 0, 2]


THREADS = """
import threading
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
other = 1 - dist.get_rank()
receiver = threading.Thread(target=lambda: [dist.recv(torch.empty(1), other, tag=n) for n in range(100)])
receiver.start()
for n in range(100):
    dist.send(torch.ones(1), other, tag=n)
    if n % 10 == 0:
        dist.all_reduce(torch.ones(2))
receiver.join()
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""


def test_messages_of_two_threads_leave_collectives_their_numbers(tmp_path: Path) -> None:
    """One sends while another receives: what is not certain meanwhile has no number, and later ones are right."""
    for recorded in run(tmp_path, THREADS, 2):
        numbers = [s.seq for s in recorded.spans("collective", "all_reduce")]
        assert numbers[-1] == 11
        assert all(seq in (0, n) for n, seq in enumerate(numbers, 1))
