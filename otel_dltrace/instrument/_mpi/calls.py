"""The calls of mpi4py that are traced, as a table: one row for each family of methods."""

from collections.abc import Iterator
from typing import Any

from otel_dltrace.instrument._mpi.family import Call, Form, Role

# -- collectives ----------------------------------------------------------------------------------

_BOTH = "sendbuf recvbuf"
_ALL, _VECTOR = "I init object", "I init"
COLLECTIVES = (
    Call("Barrier", forms=_ALL),
    Call("Bcast", "buf root", buffers="buf", root="root", forms=_ALL),
    Call("Gather", f"{_BOTH} root", buffers=_BOTH, parts="recvbuf", root="root", forms=_ALL),
    Call("Gatherv", f"{_BOTH} root", buffers=_BOTH, parts="recvbuf", root="root", forms=_VECTOR),
    Call("Scatter", f"{_BOTH} root", buffers=_BOTH, parts="sendbuf", root="root", forms=_ALL),
    Call("Scatterv", f"{_BOTH} root", buffers=_BOTH, parts="sendbuf", root="root", forms=_VECTOR),
    Call("Allgather", _BOTH, buffers=_BOTH, parts="recvbuf", forms=_ALL),
    Call("Allgatherv", _BOTH, buffers=_BOTH, parts="recvbuf", forms=_VECTOR),
    Call("Alltoall", _BOTH, buffers=_BOTH, parts=_BOTH, forms=_ALL),
    Call("Alltoallv", _BOTH, buffers=_BOTH, parts=_BOTH, forms=_VECTOR),
    Call("Alltoallw", _BOTH, buffers=_BOTH, parts=_BOTH, forms=_VECTOR),
    Call("Reduce", f"{_BOTH} op root", buffers=_BOTH, root="root", forms=_ALL),
    Call("Allreduce", f"{_BOTH} op", buffers=_BOTH, forms=_ALL),
    Call("Reduce_scatter_block", f"{_BOTH} op", buffers=_BOTH, parts=_BOTH, forms=_VECTOR),
    Call("Reduce_scatter", f"{_BOTH} recvcounts op", buffers=_BOTH, forms=_VECTOR),
    Call("Scan", f"{_BOTH} op", holder="Intracomm", buffers=_BOTH, forms=_ALL),
    Call("Exscan", f"{_BOTH} op", holder="Intracomm", buffers=_BOTH, forms=_ALL),
    Call("Neighbor_allgather", _BOTH, holder="Topocomm", buffers=_BOTH, parts="recvbuf", forms=_ALL),
    Call("Neighbor_allgatherv", _BOTH, holder="Topocomm", buffers=_BOTH, parts="recvbuf", forms=_VECTOR),
    Call("Neighbor_alltoall", _BOTH, holder="Topocomm", buffers=_BOTH, parts=_BOTH, forms=_ALL),
    Call("Neighbor_alltoallv", _BOTH, holder="Topocomm", buffers=_BOTH, parts=_BOTH, forms=_VECTOR),
    Call("Neighbor_alltoallw", _BOTH, holder="Topocomm", buffers=_BOTH, parts=_BOTH, forms=_VECTOR),
    Call("Agree", "flag", forms="I"),
)

# -- messages -------------------------------------------------------------------------------------


def _send(name: str, forms: str) -> Call:
    return Call(name, "buf dest tag", Role.SEND, buffers="buf", peer="dest", tag="tag", forms=forms)


def _probe(name: str, holder: str = "Comm") -> Call:
    on_class = holder == "Message"
    parameters = ("comm " if on_class else "") + "source tag status"
    comm = "comm" if on_class else ""
    return Call(name, parameters, Role.PROBE, holder, peer="source", tag="tag", on_class=on_class, comm=comm)


def _both_ways(name: str, parameters: str, buffers: str, tag: str, forms: str) -> Call:
    source = ("source", "recvtag")
    return Call(name, parameters, Role.SEND_RECEIVE, buffers=buffers, peer="dest", tag=tag, source=source, forms=forms)


def _partitioned(name: str, role: Role, peer: str) -> Call:
    parameters = f"buf partitions {peer} tag info"
    return Call(name, parameters, role, buffers="buf", peer=peer, tag="tag", form=Form.PERSISTENT)


MESSAGES = (
    _send("Send", "I init object iobject"),
    _send("Bsend", "I init object iobject"),
    _send("Ssend", "I init object iobject"),
    _send("Rsend", "I init"),
    Call(
        "Recv",
        "buf source tag status",
        Role.RECEIVE,
        buffers="buf",
        peer="source",
        tag="tag",
        forms="I init object iobject",
    ),
    _partitioned("Psend_init", Role.SEND, "dest"),
    _partitioned("Precv_init", Role.RECEIVE, "source"),
    _both_ways(
        "Sendrecv", "sendbuf dest sendtag recvbuf source recvtag status", "sendbuf recvbuf", "sendtag", "I object"
    ),
    _both_ways("Sendrecv_replace", "buf dest sendtag source recvtag status", "buf buf", "sendtag", "I"),
    *(_probe(name) for name in ("Probe", "probe", "Iprobe", "iprobe")),
    *(_probe(name) for name in ("Mprobe", "mprobe", "Improbe", "improbe")),
    *(_probe(name, "Message") for name in ("Probe", "probe", "Iprobe", "iprobe")),
    Call("Recv", "buf status", Role.MATCHED, "Message", buffers="buf", forms="I"),
    Call("recv", "status", Role.MATCHED, "Message"),
    Call("irecv", "", Role.MATCHED, "Message", form=Form.REQUEST),
)

# -- communicators, windows, files ----------------------------------------------------------------


def _make(name: str, parameters: str, part: str = "", holder: str = "Intracomm", **more: Any) -> Call:
    return Call(name, parameters, Role.CREATE, holder, part=part, **more)


_GROUPS = "local_group local_leader remote_group remote_leader"
COMMUNICATORS = (
    _make("Dup", "info", holder="Comm", forms="I"),
    _make("Dup_with_info", "info", holder="Comm", forms="I"),
    _make("Clone", "", holder="Comm"),
    _make("Create", "group", "ranks", "Comm"),
    _make("Split", "color key", "color", "Comm"),
    _make("Split_type", "split_type key info", "ranks", "Comm"),
    _make("Shrink", "", holder="Comm", forms="I"),
    _make("Create_group", "group tag", "members"),
    _make("Create_cart", "dims periods reorder"),
    _make("Create_graph", "index edges reorder"),
    _make("Create_dist_graph", "sources degrees destinations weights info reorder"),
    _make("Create_dist_graph_adjacent", "sources destinations sourceweights destweights info reorder"),
    _make("Create_intercomm", "local_leader peer_comm remote_leader tag", "members"),
    _make("Sub", "remain_dims", "ranks", "Cartcomm"),
    _make("Merge", "high", holder="Intercomm"),
    _make("Accept", "port_name info root", "unknown"),
    _make("Connect", "port_name info root", "unknown"),
    _make("Spawn", "command args maxprocs info root errcodes", "unknown"),
    _make("Spawn_multiple", "command args maxprocs info root errcodes", "unknown"),
    # No communicator stands behind these: they are of this rank's own.
    _make("Join", "fd", "unknown", "Comm", on_class=True, comm="comm"),
    _make("Create_from_group", "group stringtag info", "unknown", on_class=True, comm="comm"),
    _make("Create_from_groups", f"{_GROUPS} stringtag", "unknown", "Intercomm", on_class=True, comm="comm"),
    *(Call(name, role=Role.FREE) for name in ("Free", "free", "Disconnect")),
)


def _window(name: str, parameters: str) -> Call:
    return _make(name, parameters, "win", "Win", on_class=True, comm="comm")


def _one_sided(name: str, parameters: str, peer: str = "target_rank", form: Form = Form.BLOCKING) -> Call:
    takes = "origin" if "origin" in parameters else ""
    return Call(name, parameters, Role.ONE_SIDED, "Win", takes, peer=peer, form=form)


_TARGET = "origin target_rank target"
_FETCH = "origin result target_rank target op"
WINDOWS = (
    _window("Create", "memory disp_unit info comm"),
    _window("Allocate", "size disp_unit info comm"),
    _window("Allocate_shared", "size disp_unit info comm"),
    _window("Create_dynamic", "info comm"),
    *(Call(name, "", Role.FREE, "Win") for name in ("Free", "free")),
    Call("Fence", "assertion", holder="Win"),
    *(_one_sided(name, _TARGET) for name in ("Put", "Get", "Accumulate")),
    *(_one_sided(name, _TARGET, form=Form.REQUEST) for name in ("Rput", "Rget", "Raccumulate")),
    _one_sided("Get_accumulate", _FETCH),
    _one_sided("Rget_accumulate", _FETCH, form=Form.REQUEST),
    _one_sided("Fetch_and_op", "origin result target_rank target_disp op"),
    _one_sided("Compare_and_swap", "origin compare result target_rank target_disp"),
    _one_sided("Lock", "rank lock_type assertion", "rank"),
    *(_one_sided(name, "rank", "rank") for name in ("Unlock", "Flush", "Flush_local")),
    *(
        Call(name, "", Role.LOCAL, "Win")
        for name in (
            *("Lock_all", "Unlock_all", "Flush_all", "Flush_local_all"),
            *("Start", "Complete", "Post", "Wait", "Sync"),
        )
    ),
    Call("Test", "", Role.PROBE, "Win"),
)


def _file(name: str, role: Role, parameters: str = "buf status", forms: str = "") -> Call:
    return Call(name, parameters, role, "File", "buf" if "buf" in parameters else "", forms=forms)


def _files() -> Iterator[Call]:
    for verb in ("Read", "Write"):
        yield _file(verb, Role.LOCAL, forms="I")
        yield _file(f"{verb}_at", Role.LOCAL, "offset buf status", forms="I")
        yield _file(f"{verb}_shared", Role.LOCAL, forms="I")
        yield _file(f"{verb}_all", Role.COLLECTIVE, forms="I")
        yield _file(f"{verb}_at_all", Role.COLLECTIVE, "offset buf status", forms="I")
        yield _file(f"{verb}_ordered", Role.COLLECTIVE)
        for kind in ("all", "at_all", "ordered"):
            begin = "offset buf" if kind == "at_all" else "buf"
            yield _file(f"{verb}_{kind}_begin", Role.COLLECTIVE, begin)
            # Its bytes are those of the call that began it.
            yield Call(f"{verb}_{kind}_end", "buf status", holder="File")


FILES = (
    _make("Open", "comm filename amode info", "file", "File", on_class=True, comm="comm"),
    Call("Close", "", Role.FREE, "File"),
    *_files(),
    *(Call(name, "", Role.COLLECTIVE, "File") for name in ("Set_size", "Preallocate", "Set_view", "Sync")),
)

FAMILIES = COLLECTIVES + MESSAGES + COMMUNICATORS + WINDOWS + FILES
CALLS = tuple(method for family in FAMILIES for method in family.methods())
