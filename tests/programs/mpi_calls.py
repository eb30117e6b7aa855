"""Every call of mpi4py's table, on two to four ranks; prints a digest of all that was received."""

import hashlib
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
right, left = (rank + 1) % size, (rank - 1) % size
seen = hashlib.sha256()
COUNT = 6


def ones() -> np.ndarray:
    return np.arange(COUNT, dtype="f8") + rank


def room(times: int = 1) -> np.ndarray:
    return np.zeros(COUNT * times)


def keep(*values: object) -> None:
    seen.update(repr([v.tolist() if isinstance(v, np.ndarray) else v for v in values]).encode())


def each(comm: MPI.Comm, name: str, *arguments: object) -> None:
    """Call *name*, its I-form and its persistent form."""
    getattr(comm, name)(*arguments)
    getattr(comm, f"I{name.lower()}")(*arguments).Wait()
    request = getattr(comm, f"{name}_init")(*arguments)
    for _ in range(2):
        request.Start()
        request.Wait()
    request.Free()


def collectives() -> None:
    n = size
    counts, displs = [COUNT] * n, [COUNT * i for i in range(n)]
    vector = (counts, displs)
    types, offsets = [MPI.DOUBLE] * n, [8 * d for d in displs]
    one, many, out, wide = ones(), np.tile(ones(), n), room(), room(n)
    each(world, "Barrier")
    each(world, "Bcast", out, 1)
    each(world, "Gather", one, wide, 1)
    each(world, "Gatherv", one, [wide, vector, MPI.DOUBLE], 1)
    each(world, "Scatter", many, out, 0)
    each(world, "Scatterv", [many, vector, MPI.DOUBLE], out, 0)
    each(world, "Allgather", one, wide)
    keep(out, wide)
    each(world, "Allgatherv", one, [wide, vector, MPI.DOUBLE])
    each(world, "Alltoall", many, wide)
    each(world, "Alltoallv", [many, vector, MPI.DOUBLE], [wide, vector, MPI.DOUBLE])
    each(world, "Alltoallw", [many, counts, offsets, types], [wide, counts, offsets, types])
    each(world, "Reduce", one, out, MPI.SUM, 1)
    each(world, "Allreduce", one, out)
    each(world, "Allreduce", MPI.IN_PLACE, room())
    each(world, "Reduce_scatter_block", many, out)
    each(world, "Reduce_scatter", many, out, counts)
    each(world, "Scan", one, out)
    each(world, "Exscan", one, out)
    keep(wide, out)
    keep(world.bcast({"a": rank}, 1), world.gather(rank, 1), world.scatter([*range(n)], 0), world.allgather("x"))
    keep(world.alltoall([*range(n)]), world.reduce(rank, MPI.SUM, 1), world.allreduce(rank))
    keep(world.scan(rank), world.exscan(rank))
    world.barrier()


def neighbours(comm: MPI.Topocomm) -> None:
    n = 2
    vector = ([COUNT] * n, [0, COUNT])
    types, counts, offsets = [MPI.DOUBLE] * n, [COUNT] * n, [0, 8 * COUNT]
    many, wide = np.tile(ones(), n), room(n)
    each(comm, "Neighbor_allgather", ones(), wide)
    each(comm, "Neighbor_allgatherv", ones(), [wide, vector, MPI.DOUBLE])
    each(comm, "Neighbor_alltoall", many, wide)
    each(comm, "Neighbor_alltoallv", [many, vector, MPI.DOUBLE], [wide, vector, MPI.DOUBLE])
    each(comm, "Neighbor_alltoallw", [many, counts, offsets, types], [wide, counts, offsets, types])
    keep(wide, comm.neighbor_allgather(rank), comm.neighbor_alltoall([rank, -rank]))


def messages() -> None:
    MPI.Attach_buffer(np.zeros(1 << 16, "u1"))
    out = room()
    for tag, mode in enumerate(("Send", "Bsend", "Ssend", "Rsend")):
        receive = world.Irecv(out, left, tag)
        world.Barrier()
        getattr(world, mode)(ones(), right, tag)
        receive.Wait()
        requests = [world.Irecv(out, MPI.ANY_SOURCE, tag)]
        world.Barrier()
        requests.append(getattr(world, f"I{mode.lower()}")([ones(), MPI.DOUBLE], right, tag))
        MPI.Request.Waitall(requests)
        requests = [getattr(world, f"{mode}_init")(ones(), right, tag), world.Recv_init(out, left, tag)]
        requests[1].Start()
        world.Barrier()
        MPI.Prequest.Startall(requests[:1])
        while not MPI.Request.Testall(requests):
            pass
        keep(out)
    objects()
    probes(out)
    world.Sendrecv(ones(), right, 3, out, left, 3)
    world.Sendrecv_replace(out, right, 4, MPI.ANY_SOURCE, 4)
    world.Isendrecv(ones(), right, 5, out, left, 5).Wait()
    world.Isendrecv_replace(out, right, 6, left, 6).Wait()
    keep(out, world.sendrecv({"to": right}, right, 7, None, left, 7))
    world.Barrier()
    MPI.Detach_buffer()


def objects() -> None:
    for tag, mode in enumerate(("send", "bsend", "ssend")):
        receive = world.irecv(source=left, tag=tag)
        getattr(world, mode)({"from": rank}, right, tag)
        keep(receive.wait())
        request = getattr(world, f"i{mode}")([rank], right, tag)
        keep(world.recv(source=left, tag=MPI.ANY_TAG))
        request.wait()
        requests = [getattr(world, f"i{mode}")((rank, i), right, 10 + i) for i in range(3)]
        received = [world.irecv(source=left, tag=10 + i) for i in range(3)]
        keep(MPI.Request.waitall(received))
        MPI.Request.Waitsome(requests[:1])
        MPI.Request.Waitany(requests[1:2])
        MPI.Request.waitall(requests)


def probes(out: np.ndarray) -> None:
    names = ("Probe", "probe", "Iprobe", "iprobe")
    for look in [getattr(world, name) for name in names]:
        request = world.Isend(ones(), right, 20)
        while not look(left, 20):
            pass
        world.Recv(out, left, 20)
        request.Wait()
    matching = [partial(getattr(MPI.Message, name), world) for name in names]
    matching += [partial(getattr(world, name)) for name in ("Mprobe", "mprobe", "Improbe", "improbe")]
    for look in matching:
        is_object = look.func.__name__.islower()
        request = world.isend(rank, right, 21) if is_object else world.Isend(ones(), right, 21)
        message = None
        while not message:
            message = look(left, 21)
        keep(message.recv() if is_object else message.Recv(out))
        request.Wait()
    request = world.Isend(ones(), right, 22)
    world.Mprobe(left, 22).Irecv(out).Wait()
    request.Wait()
    request = world.isend("last", right, 23)
    keep(world.mprobe(left, 23).irecv().wait())
    request.wait()


def partitioned() -> None:
    out = room()
    receive, send = world.Precv_init(out, 2, left, 30), world.Psend_init(ones(), 2, right, 30)
    MPI.Prequest.Startall([receive, send])
    send.Pready_range(0, 1)
    MPI.Request.Waitall([receive, send])
    keep(out)
    receive.Free()
    send.Free()


def communicators() -> None:
    group = world.Get_group()
    made = [world.Dup(), world.Dup_with_info(MPI.INFO_NULL), world.Clone(), world.Create(group)]
    for request in (world.Idup(), world.Idup_with_info(MPI.INFO_NULL)):
        request[1].Wait()
        made.append(request[0])
    made += [world.Split(rank % 2, rank), world.Split_type(MPI.COMM_TYPE_SHARED), world.Create_group(group, 3)]
    edges = [x for r in range(size) for x in ((r - 1) % size, (r + 1) % size)]
    made.append(world.Create_graph([2 * (i + 1) for i in range(size)], edges))
    made.append(world.Create_dist_graph([rank], [2], [left, right]))
    made.append(world.Create_dist_graph_adjacent([left, right], [left, right]))
    cart = world.Create_cart([size], [True])
    made += [cart, cart.Sub([True])]
    half = made[6]
    between = half.Create_intercomm(0, world, 1 - rank % 2, 5)
    made += [between, between.Merge(high=bool(rank % 2))]
    for comm in made:
        keep(comm.allgather(rank))
    # Both sides of an intercommunicator count their ranks from 0.
    if half.rank < between.remote_size:
        between.Sendrecv(ones(), half.rank, 8, room(), half.rank, 8)
    neighbours(cart)
    for comm in reversed(made[1:]):
        comm.Free()
    made[0].Disconnect()


def joined() -> None:
    """Make a communicator of two ranks that have a socket between them."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            world.send(server.getsockname()[1], 1)
            end = server.accept()[0]
    elif rank == 1:
        end = socket.create_connection(("127.0.0.1", world.recv(source=0)))
    else:
        return
    with end:
        between = MPI.Comm.Join(end.fileno())
        keep(between.remote_size)
        between.Disconnect()


def windows() -> None:
    memory, out, old = np.zeros(COUNT), ones(), room()
    dynamic = MPI.Win.Create_dynamic(comm=world)
    made = [MPI.Win.Allocate(64, 8, comm=world), MPI.Win.Allocate_shared(64, 8, comm=world), dynamic]
    window = MPI.Win.Create(memory, 8, comm=world)
    for name in ("Put", "Accumulate"):
        window.Fence()
        getattr(window, name)(out, right)
        window.Fence()
    window.Get(old, right)
    window.Fence()
    keep(memory, old)
    window.Get_accumulate(out, old, right)
    window.Fence()
    window.Fetch_and_op(out[:1], old[:1], right)
    window.Fence()
    window.Compare_and_swap(out[:1], out[:1], old[:1], right)
    window.Fence()
    passive(window, out, old)
    group = world.Get_group()
    window.Post(group)
    window.Start(group)
    window.Complete()
    window.Wait()
    window.Post(group)
    window.Start(group)
    window.Complete()
    while not window.Test():
        pass
    for other in [*made, window]:
        other.Free()


def passive(window: MPI.Win, out: np.ndarray, old: np.ndarray) -> None:
    window.Lock(right)
    window.Put(out, right)
    window.Flush(right)
    window.Flush_local(right)
    window.Unlock(right)
    window.Lock_all()
    window.Rput(out, right).Wait()
    window.Rget(old, right).Wait()
    window.Raccumulate(out, right).Wait()
    window.Rget_accumulate(out, old, right).Wait()
    window.Flush_all()
    window.Flush_local_all()
    window.Sync()
    window.Unlock_all()
    world.Barrier()


def files() -> None:
    path = world.bcast(str(Path(tempfile.mkdtemp()) / "data") if rank == 0 else "")
    file = MPI.File.Open(world, path, MPI.MODE_RDWR | MPI.MODE_CREATE | MPI.MODE_DELETE_ON_CLOSE)
    file.Set_size(1 << 12)
    file.Preallocate(1 << 12)
    file.Set_view(0, MPI.DOUBLE)
    at, out = rank * COUNT, room()
    for verb, data in (("write", ones()), ("read", out)):
        call, start = verb.capitalize(), f"I{verb}"
        file.Seek(at)
        getattr(file, call)(data)
        file.Seek(at)
        getattr(file, start)(data).Wait()
        getattr(file, f"{call}_at")(at, data)
        getattr(file, f"{start}_at")(at, data).Wait()
        getattr(file, f"{call}_at_all")(at, data)
        getattr(file, f"{start}_at_all")(at, data).Wait()
        file.Seek(at)
        getattr(file, f"{call}_all")(data)
        file.Seek(at)
        getattr(file, f"{start}_all")(data).Wait()
        for kind in ("all", "at_all"):
            file.Seek(at)
            getattr(file, f"{call}_{kind}_begin")(*([at] if kind == "at_all" else []), data)
            getattr(file, f"{call}_{kind}_end")(data)
        shared(file, call, start, data)
        file.Sync()
        world.Barrier()
    keep(out)
    file.Close()


def shared(file: MPI.File, call: str, start: str, data: np.ndarray) -> None:
    """Read or write where the pointer is that all ranks share."""
    file.Seek_shared(0)
    getattr(file, f"{call}_ordered")(data)
    file.Seek_shared(0)
    getattr(file, f"{call}_ordered_begin")(data)
    getattr(file, f"{call}_ordered_end")(data)
    world.Barrier()  # a rank may else be ahead of what others still do in order
    room = np.zeros(COUNT)
    getattr(file, f"{call}_shared")(room)
    getattr(file, f"{start}_shared")(room).Wait()
    world.Barrier()


PARTS = (collectives, messages, partitioned, communicators, joined, windows, files)
for part in PARTS:
    if part.__name__ in sys.argv[1:] or len(sys.argv) == 1:
        part()
print(rank, seen.hexdigest(), flush=True)
MPI.Finalize()
