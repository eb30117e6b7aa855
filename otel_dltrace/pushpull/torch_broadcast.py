"""Values that all processes take over from one: a model's, and an optimizer's state."""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otel_dltrace.pushpull import torch_ops as bps
from otel_dltrace.pushpull.errors import PushPullError, shown

_REFUSED = -1
"""The size of a state that its root does not send."""
_UNSENDABLE = (pickle.PickleError, AttributeError, RuntimeError, TypeError, ValueError)
"""What torch raises of a state that it cannot write, or would not read."""


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0, prefix: str = "Parameter."
) -> None:
    """Give all processes the values that *params* have on *root_rank*.

    Args:
        params: A model's ``state_dict()`` or ``named_parameters()``; what is no tensor is left alone.
        root_rank: Whose values they are.
        prefix: Goes before each name.

    Raises:
        PushPullError: No process has that rank: nobody would give any values; or a name is there twice.
    """
    _check_root(root_rank)
    items = params.items() if isinstance(params, Mapping) else params
    tensors = sorted(((name, value) for name, value in items if isinstance(value, Tensor)), key=itemgetter(0))
    for (name, _), (following, _) in pairwise(tensors):
        if name == following:
            raise PushPullError(f"{shown(name)} appears twice in what is broadcast; give each tensor its own name")
    handles = []
    for name, value in tensors:
        values = value.detach()
        # What the others push is apart: tied parameters are one memory, which the first result would change.
        pushed = values if bps.rank() == root_rank else torch.zeros_like(values)
        handles.append(bps.start(pushed, values, False, prefix + name))
    for handle in handles:
        bps.synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give all processes the state that *optimizer* has on *root_rank*.

    Raises:
        PushPullError: No process has that rank, or something in its state is no tensor and no plain value of Python:
            nothing is sent then, and all processes are told.
    """
    _check_root(root_rank)
    written, refusal = io.BytesIO(), ""
    if bps.rank() == root_rank:
        written, refusal = _written(optimizer)
    # A tensor has one size under one name, so the size goes ahead and into the name.
    length = torch.tensor([_REFUSED if refusal else written.getbuffer().nbytes])
    broadcast_parameters({"OptimizerState": length}, root_rank, "Size.")
    if int(length) == _REFUSED:
        raise PushPullError(refusal or f"rank {root_rank} cannot send its optimizer's state: it says what is in it")
    state = torch.zeros(int(length), dtype=torch.uint8)
    if bps.rank() == root_rank:
        state = torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
    broadcast_parameters({f"OptimizerState.{int(length)}": state}, root_rank)
    if bps.rank() != root_rank:
        sent = io.BytesIO(state.numpy().tobytes())
        optimizer.load_state_dict(torch.load(sent, _to_the_device_of(optimizer), weights_only=True))


def _to_the_device_of(optimizer: torch.optim.Optimizer) -> Callable[[Any, str], Any]:
    """Return where to load what the root has: on its device would be all ranks' states, or it is none that is here."""
    devices = [parameter.device for group in optimizer.param_groups for parameter in group["params"]]
    return lambda storage, location: storage if location == "cpu" else storage.to(device=devices[0])


def _written(optimizer: torch.optim.Optimizer) -> tuple[io.BytesIO, str]:
    """Return the state of *optimizer* as bytes, and why the other processes would not read them, "" if they do."""
    try:
        state = _plain(optimizer.state_dict())
    except _UNSENDABLE as error:  # one that holds itself, or is nested too deep
        return io.BytesIO(), f"the optimizer's state cannot be sent: {type(error).__name__}: {error}"
    try:
        return _sendable(state), ""
    except _UNSENDABLE:
        cure = "make it a tensor or a plain Python value"
        return io.BytesIO(), f"the optimizer's state cannot be sent: {_what_is_wrong(state)}; {cure}"


def _what_is_wrong(state: Any) -> str:
    for place, value in _leaves(state):
        try:
            _sendable(value)
        except _UNSENDABLE:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            return f"its state_dict(){place} is a {kind}"
    return "a key in its state_dict() is not a plain value"


def _sendable(value: Any) -> io.BytesIO:
    """Return *value* as bytes that are read without trusting any pickle; raise one of `_UNSENDABLE` if there are none.

    Read on ``meta``: one tensor at a time is in memory a second time.
    """
    written = io.BytesIO()
    torch.save(value, written)
    written.seek(0)
    torch.load(written, "meta", weights_only=True)
    return written


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in *value* and holds nothing itself, each with its place, as in ``["state"][0]``."""
    if type(value) is dict:
        for key, one in value.items():
            yield from _leaves(one, f"{place}[{key!r}]")
    elif type(value) in {list, tuple}:
        for number, one in enumerate(value):
            yield from _leaves(one, f"{place}[{number}]")
    else:
        yield place, value


def _check_root(root_rank: int) -> None:
    if not 0 <= root_rank < bps.size():
        raise PushPullError(f"root_rank={root_rank} is not a rank of this job: it has {bps.size()}, counted from 0")


def _plain(value: Any) -> Any:
    """Return *value* with Python's numbers for numpy's, a rate of ``0.1 * np.sqrt(size())``: no pickle is trusted."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_plain(one) for one in value)
    return value.item() if isinstance(value, np.generic) else value
