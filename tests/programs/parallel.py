"""Small trainings, one for each way in which torch spreads a model over ranks, one after the other.

Each returns what it trained, whose bytes must be the same with and without tracing, and has process
groups of its own. What the harness calls `TRACED` stands before this text.
"""

# ruff: noqa: F821  -- the harness defines `say`
import contextlib
import hashlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

WIDTH, BATCH = 48, 4
SMALL_BUCKETS = {"bucket_cap_mb": 0.02}


def mlp(depth=4):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def batches(count, seed=None):
    """Return a loader of *count* batches, each rank's own or, with *seed*, the same on all."""
    random = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    return DataLoader(torch.randn(count * BATCH, WIDTH, generator=random), batch_size=BATCH)


def train(model, optimizer, loader):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return model


# -- DistributedDataParallel --------------------------------------------------------------------------


def ddp(**options):
    return DistributedDataParallel(mlp(), process_group=dist.new_group(), **SMALL_BUCKETS, **options)


def accumulation():
    model = ddp()
    optimizer = sgd(model)
    for batch in batches(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch).pow(2).mean().backward()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return model


class Branches(nn.Module):
    """Two ways through, of which a rank takes one."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = mlp(1), mlp(2), mlp(2)

    def forward(self, batch):
        """Take the way that batch and rank say."""
        return (self.left if (dist.get_rank() + int(batch[0, 0] > 0)) % 2 else self.right)(self.first(batch))


def unused_parameters():
    model = DistributedDataParallel(
        Branches(), process_group=dist.new_group(), find_unused_parameters=True, **SMALL_BUCKETS
    )
    return train(model, sgd(model), batches(3))


class Shared(torch.autograd.Function):
    """Takes the mean over all ranks away. It calls what SyncBatchNorm calls, which runs on GPUs alone."""

    @staticmethod
    def forward(ctx, batch, group):
        """Gather the means."""
        ctx.group = group
        means = [torch.empty(WIDTH) for _ in range(group.size())]
        dist.all_gather(means, batch.mean(0), group=group)
        return batch - torch.stack(means).mean(0)

    @staticmethod
    def backward(ctx, gradient):
        """Sum the gradients of the means."""
        mean = gradient.mean(0)
        dist.all_reduce(mean, group=ctx.group)
        return gradient - mean / ctx.group.size(), None


class Normalised(nn.Module):
    """A normalisation over all ranks, and one with buffers, which DDP broadcasts in each forward."""

    def __init__(self, group):
        super().__init__()
        self.group, self.first, self.norm, self.last = group, mlp(2), nn.BatchNorm1d(WIDTH), mlp(2)

    def forward(self, batch):
        """Normalise between the layers."""
        return self.last(Shared.apply(self.norm(self.first(batch)), self.group))


def normalised():
    group = dist.new_group()
    model = DistributedDataParallel(Normalised(group), process_group=group, **SMALL_BUCKETS)
    return train(model, sgd(model), batches(3))


def bucket_views():
    model = ddp(gradient_as_bucket_view=True)
    optimizer = sgd(model)
    train(model, optimizer, batches(3))
    for batch in batches(3):
        optimizer.zero_grad(set_to_none=False)
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return model


def static_graph():
    model = ddp(static_graph=True)
    return train(model, sgd(model), batches(3))


def two_static_graphs():
    first = ddp(static_graph=True)
    second = DistributedDataParallel(mlp(), process_group=first.process_group, static_graph=True, **SMALL_BUCKETS)
    first.module[1].weight.register_hook(lambda _gradient: dist.all_reduce(torch.ones(3), group=first.process_group))
    return train(nn.Sequential(first, second), sgd(nn.ModuleList([first, second])), batches(3))


def call_in_backward():
    model, group = ddp(), dist.new_group()
    middle = model.module[1].weight

    def call(gradient):
        dist.all_reduce(gradient.detach().clone(), group=model.process_group)
        dist.all_reduce(torch.ones(3), group=group)

    middle.register_hook(call)
    return train(model, sgd(model), batches(3))


def own_hook():
    model = ddp()
    model.register_comm_hook(model.process_group, allreduce_hook)
    return train(model, sgd(model), batches(3))


def failing_hook():
    model = ddp()

    def fail(_state, bucket: dist.GradBucket):
        raise ValueError(f"no way for bucket {bucket.index()}")

    model.register_comm_hook(None, fail)
    try:
        model(torch.ones(BATCH, WIDTH)).sum().backward()
    except ValueError as error:
        say(failed=str(error))
    return mlp()


def late_hook():
    model = ddp()
    optimizer = sgd(model)
    train(model, optimizer, batches(3))
    model.register_comm_hook(model.process_group, fp16_compress_hook)
    try:
        model.register_comm_hook(None, allreduce_hook)
    except RuntimeError as error:
        say(second=str(error))
    return train(model, optimizer, batches(3))


def built_in_hooks():
    early, late = ddp(), ddp()
    early._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    optimizers = [sgd(early), sgd(late)]
    train(early, optimizers[0], batches(3))
    train(late, optimizers[1], batches(1))
    late._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(late, optimizers[1], batches(2))
    return nn.ModuleList([early, late])


def join(initial, counts):
    model = ddp()
    optimizer = sgd(model)
    with model.join(divide_by_initial_world_size=initial):
        train(model, optimizer, batches(counts[dist.get_rank()]))
    return train(model, optimizer, batches(1))


def join_by_world():
    return join(True, (2, 4, 3))


def join_by_present():
    return join(False, (4, 2, 3))


def zero():
    model = ddp()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=model.process_group, lr=0.05, momentum=0.9
    )
    return train(model, optimizer, batches(3))


# -- sharded ------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """What a transformer looks like to FSDP: a row of blocks and something around them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([mlp(2) for _ in range(2)])

    def forward(self, batch):
        """Go through all of them."""
        batch = self.first(batch)
        for block in self.blocks:
            batch = block(batch)
        return batch


def fsdp2():
    model = Blocks()
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model)
    for batch in batches(3):
        optimizer.zero_grad()
        model.set_requires_gradient_sync(False)
        model(batch).pow(2).mean().backward()
        model.set_requires_gradient_sync(True)
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return model


def fsdp1():
    model = FullyShardedDataParallel(mlp(), process_group=dist.new_group(), device_id=torch.device("cpu"))
    return train(model, sgd(model), batches(3))


# -- tensors and layers over ranks --------------------------------------------------------------------


def tensor_parallel():
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = parallelize_module(mlp(2), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return train(model, sgd(model), batches(3, seed=3))


def pipeline(schedule):
    group, rank, last = dist.new_group(), dist.get_rank(), dist.get_world_size() - 1
    model = mlp(2 * last + 2)[2 * rank : 2 * rank + 2]
    stage = PipelineStage(model, rank, last + 1, torch.device("cpu"), group=group)
    runs = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = sgd(model)
    for batch in batches(3, seed=4):
        optimizer.zero_grad()
        runs.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == last else {}))
        optimizer.step()
    return model


def gpipe():
    return pipeline(ScheduleGPipe)


def one_f_one_b():
    return pipeline(Schedule1F1B)


# -- all of them --------------------------------------------------------------------------------------

SCENARIOS = [
    (accumulation, 3),
    (unused_parameters, 3),
    (normalised, 3),
    (bucket_views, 6),
    (static_graph, 3),
    (two_static_graphs, 3),
    (call_in_backward, 3),
    (own_hook, 3),
    (failing_hook, 0),
    (late_hook, 6),
    (built_in_hooks, 6),
    (zero, 3),
    (fsdp2, 3),
    (fsdp1, 3),
    (tensor_parallel, 3),
    (gpipe, 3),
    (one_f_one_b, 3),
    (join_by_world, (3, 5, 4)),
    (join_by_present, (5, 3, 4)),
]


def digest(model):
    parameters = (p.detach() for p in model.parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return hashlib.sha256(b"".join(p.contiguous().numpy().tobytes() for p in local)).hexdigest()


def flight():
    dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
    keys = ("collective_seq_id", "p2p_seq_id", "profiling_name", "input_sizes", "output_sizes", "is_p2p")
    types = ("input_dtypes", "output_dtypes")
    return [{"group": e["process_group"][0], **{key: e[key] for key in (*keys, *types)}} for e in dump["entries"]]


dist.init_process_group("gloo")
for scenario, steps in SCENARIOS:
    torch.manual_seed(0)
    count = steps[dist.get_rank()] if isinstance(steps, tuple) else steps
    groups = set(dist.distributed_c10d._world.pg_names.values())
    model = scenario()
    groups = set(dist.distributed_c10d._world.pg_names.values()) - groups
    say(scenario=scenario.__name__, steps=count, digest=digest(model), groups=sorted(groups))
    dist.barrier()
say(flight=flight())
with contextlib.suppress(RuntimeError):
    dist.destroy_process_group()
