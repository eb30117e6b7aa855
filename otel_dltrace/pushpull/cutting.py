"""How a tensor becomes partitions: what follows from its size, once, and the tasks of each push_pull."""

from otel_dltrace.pushpull.buffers import fingerprint, make_buffers
from otel_dltrace.pushpull.compression import COMPRESSIBLE
from otel_dltrace.pushpull.errors import MismatchError, shown
from otel_dltrace.pushpull.keys import PARTITION_BITS, key_of, partition_bound, partitions, server_of
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.stages import stage_list
from otel_dltrace.pushpull.tasks import Operation, Task, Tensor
from otel_dltrace.pushpull.wire import DTYPES, Values


class Cutter:
    """Cuts tensors for the rank of *layout*, into partitions of at most *bound* bytes."""

    def __init__(self, layout: Layout, options: Options) -> None:
        self.layout = layout
        self.options = options
        self.bound = partition_bound(options.partition_bytes, layout.local_size)
        self._servers = layout.num_servers if layout.distributed and layout.is_root else 0

    def settle(self, tensor: Tensor, values: Values) -> None:
        """See that *tensor* can be pushed; at its first time work out what follows from its size.

        Raises:
            MismatchError: It is not what it was before, is under way already, or is nothing that can be pushed.
        """
        dtype = str(values.dtype)
        if tensor.busy:
            raise MismatchError(f"{shown(tensor.name)} is being pushed already; wait for it, or use another name")
        if tensor.buffers is None:
            self._shape(tensor, dtype, values.nbytes)
        elif (dtype, values.nbytes) != (tensor.dtype, tensor.nbytes):
            raise MismatchError(
                f"{shown(tensor.name)} had {tensor.nbytes} bytes of {tensor.dtype}, now {values.nbytes} of {dtype}; "
                "use another name"
            )
        tensor.busy = True

    def cut(self, operation: Operation) -> list[Task]:
        """Return the partitions of *operation*, each with its key and, if we talk to servers, its server."""
        tasks = []
        key_hash, workers = self.options.key_hash, self.layout.num_workers
        for index, (offset, size) in enumerate(partitions(operation.values.nbytes, self.bound)):
            key = key_of(operation.tensor.declared_key, index)
            server = server_of(key, self._servers, key_hash, workers) if self._servers else None
            tasks.append(Task(operation, index, key, offset, size, server))
        return tasks

    def _shape(self, tensor: Tensor, dtype: str, nbytes: int) -> None:
        if dtype not in DTYPES:
            raise MismatchError(f"{shown(tensor.name)} is of dtype {dtype}; only {', '.join(DTYPES)} can be pushed")
        number = len(partitions(nbytes, self.bound))
        if number >> PARTITION_BITS:
            raise MismatchError(f"{shown(tensor.name)} has {number} partitions; set BYTEPS_PARTITION_BYTES higher")
        big = nbytes >= self.options.min_compress_bytes and dtype in COMPRESSIBLE
        compressor = tensor.compressor if big else None
        tensor.stages = stage_list(self.layout, compressor is not None)
        if compressor is not None and self._servers:
            tensor.packers = [compressor.packer() for _ in range(number)]
        tensor.mark = fingerprint(tensor.name, dtype, nbytes)
        tensor.buffers = make_buffers(self.layout, self.options.folder, tensor.declared_key, tensor.mark, nbytes)
        tensor.dtype, tensor.nbytes = dtype, nbytes
