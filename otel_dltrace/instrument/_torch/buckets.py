"""Which parameters a model's gradient buckets hold, as DistributedDataParallel itself says."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from otel_dltrace.instrument._torch.groups import HOST_BACKENDS, backend_of, is_counted
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, COMM_HOOK, Source
from otel_dltrace.record.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket: its parameters' indices, its bytes, its descriptor's number in this process."""

    parameters: tuple[int, ...]
    size: int
    descriptor: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The buckets of one model in the order of their launch; *counted*: each is one all-reduce, which has a number.

    Where DDP looks for unused parameters, one more comes behind them (*tells_usage*), which tells who used which.
    """

    buckets: tuple[Bucket, ...]
    counted: bool
    source: int
    group: str
    tells_usage: bool

    @property
    def advance(self) -> int:
        """By how much a backward with nothing else in it brings the group on."""
        return len(self.buckets) + self.tells_usage


_FP16 = "BuiltinCommHookType.FP16_COMPRESS"
_ALONE = frozenset(("", "BuiltinCommHookType.ALLREDUCE", _FP16))
"""What DDP says of its hook where each bucket is one all-reduce: its own hooks in C++ call nothing else."""

hooks_told = 0
"""How often the program was seen to give a model a hook: what was known of its buckets is then no more so."""


def tell_of_hook() -> None:
    """Know that the program has given some model a hook."""
    global hooks_told  # noqa: PLW0603  -- read in each step, in which calls are dear
    hooks_told += 1


def layout_of(recorder: Recorder, model: Any, count: int, rebuilt: bool) -> Layout | None:
    """Return the buckets of *model*, which has *count* parameters; None where they cannot be known."""
    texts = said_by(model)
    parameters = model._module_parameters
    if len(parameters) != count:  # what has been frozen since DDP was made (a GAN's other half) is in its buckets
        parameters = [p for p in parameters if p.requires_grad]
    sizes = numbers(texts.get("rebuilt_bucket_sizes" if rebuilt else "bucket_sizes", ""))
    if rebuilt:
        members = [numbers(part) for part in texts.get("rebuilt_per_bucket_param_indices", "").split(",")]
    else:
        members = initial_buckets(parameters, sizes)
    all_members = sorted(chain.from_iterable(members))
    if len(parameters) != count or len(sizes) != len(members) or all_members != list(range(count)):
        return None
    return _describe(recorder, model, parameters, list(zip(members, sizes, strict=True)), texts.get("comm_hook", ""))


def said_by(model: Any) -> dict[str, str]:
    """Return the texts in what DDP logs about *model*: 7 us."""
    texts: dict[str, str] = model.logger._get_ddp_logging_data().strs_map
    return texts


def _describe(
    recorder: Recorder, model: Any, parameters: list[Any], buckets: list[tuple[list[int], int]], hook: str
) -> Layout:
    plain = hook in _ALONE
    group, backend = model.process_group, backend_of(model.process_group, parameters[0].device)
    described = []
    for k, (members, size) in enumerate(buckets):
        parameter = parameters[members[0]]
        width = parameter.element_size()
        dtype, sent = ("float16", 2) if hook == _FP16 else (parameter.dtype, width)
        number = describe(recorder, group, backend, k, dtype, plain)
        described.append(Bucket(tuple(members), size // width * sent, number))
    # On a device the end of backward is no bound: the transfer may go on after it.
    source = int(Source.BOUND if backend in HOST_BACKENDS else Source.HOST_ISSUE)
    tells_usage = model.find_unused_parameters and not model.static_graph
    return Layout(tuple(described), plain and is_counted(group, backend), source, group.group_name, tells_usage)


def describe(recorder: Recorder, group: Any, backend: str, k: int, dtype: Any, plain: bool) -> int:
    """Return the number of bucket *k*'s descriptor; what is not *plain* is a hook's, which may do anything."""
    descriptor = Descriptor(
        COLLECTIVE,
        "all_reduce" if plain else COMM_HOOK,
        group=group.group_name,
        group_size=group.size(),
        backend=backend,
        tensor=f"bucket {k}",
        dtype=str(dtype).removeprefix("torch."),
    )
    return recorder.intern(descriptor)


def initial_buckets(parameters: Sequence[Any], sizes: Sequence[int]) -> list[list[int]]:
    """Return the parameters of each bucket before DDP has rebuilt them; [] where that is not certain.

    Where all are of one type on one device, buckets are runs of parameters, the last first; the
    sizes that DDP reports must come out exactly.
    """
    if len({(p.dtype, p.device) for p in parameters}) != 1:
        return []
    buckets: list[list[int]] = []
    left = list(range(len(parameters)))
    for size in sizes:
        bucket: list[int] = []
        room = size
        while left and room > 0:
            room -= parameters[left[-1]].nbytes
            bucket.append(left.pop())
        if room:
            return []
        buckets.append(bucket)
    return [] if left else buckets


def numbers(text: str) -> list[int]:
    """Return the whole numbers in *text*, which DDP separates by commas or blanks."""
    return [int(word) for word in text.replace(",", " ").split()]
