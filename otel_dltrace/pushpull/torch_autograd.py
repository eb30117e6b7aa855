"""push_pull as autograd sees it: gradients go through it, as through that of BytePS's plugin."""

from typing import Any, cast

import torch
from torch import Tensor

from otel_dltrace.pushpull import torch_ops as bps
from otel_dltrace.pushpull.compression import Compressor


def push_pull(
    tensor: Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,  # noqa: ARG001 - BytePS's; its sums do not depend on it either
    priority: int | None = None,
    compression: Compressor | None = None,
) -> Tensor:
    """Return the mean or sum of *tensor* over all processes.

    Its gradient is the mean or sum of all processes' gradients: they compute it all, or none does. It goes by the same
    name; that of a compressed tensor by ``<name>.grad``.

    Args:
        tensor: Has the same shape and type everywhere.
        average: Whether it is the mean.
        name: The same everywhere; two tensors under way at a time have two names. Without one it is named by its
            type and size, and by a number where others of that name are not synchronized yet: all processes begin
            and synchronize those in the same order.
        version: Means nothing.
        priority: Higher goes first, where BYTEPS_SCHEDULING_CREDIT is set; unless given, as before: see `declare`.
        compression: One of `Compression`, from the first time on; unless given, as declared.

    Raises:
        PushPullError: Another process died or left, or means something else by this name.
    """
    return cast(Tensor, _PushPull.apply(tensor, average, name, priority, compression))  # type: ignore[no-untyped-call]


class _PushPull(torch.autograd.Function):
    """A push_pull whose gradient goes the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *how: Any) -> Tensor:
        """Push and pull *tensor*: whether as mean, by which name, with which priority and compression."""
        output, (average, name, priority, compression) = bps.copied(tensor), how
        pushed_as = name or bps.unnamed(output)
        handle = bps.start(output, output, average, pushed_as, priority, compression=compression)
        ctx.how = average, bps.gradient_name(pushed_as) or name, priority
        return bps.synchronize(handle)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Push and pull the gradient."""
        average, name, priority = ctx.how
        return push_pull(gradients[0], average, name, 0, priority), None, None, None, None
