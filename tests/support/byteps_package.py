"""A ``byteps`` package on disk that runs anywhere: its C++ replaced by files through which the ranks average.

Its Python is either BytePS's own, from the sdist, or a short one with the same surface.
"""

import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

VERSION = "0.2.5.post15"
FROM_SDIST = ("torch/__init__.py", "torch/ops.py", "torch/compression.py")

COMMON = """
    import os

    class BytePSBasics:
        def __init__(self, path, *parts):
            pass

        def init(self, lazy=True):
            return 0

        def shutdown(self):
            return 0

        suspend = resume = shutdown

        def size(self):
            return int(os.environ["DMLC_NUM_WORKER"])

        def rank(self):
            return int(os.environ["DMLC_WORKER_ID"])

        def local_size(self):
            return 1

        def local_rank(self):
            return 0
"""

C_LIB = """
    import collections, itertools, os, threading, time
    from pathlib import Path
    import torch

    RANK, SIZE, FOLDER = int(os.environ["DMLC_WORKER_ID"]), int(os.environ["DMLC_NUM_WORKER"]), Path(os.environ["MEET"])
    _handles, _done, _occurrences = itertools.count(1), {}, collections.Counter()

    def byteps_torch_declare_tensor(name):
        pass

    def byteps_torch_push_pull_async_torch_FloatTensor(tensor, output, average, name, version, priority):
        if name == b"refused":
            raise RuntimeError("Duplicated tensor_name")
        handle = next(_handles)
        _done[handle] = threading.Event()
        _occurrences[name] += 1
        task = f"{(name or b'').decode()}.{_occurrences[name]}"
        threading.Thread(target=_average, args=(task, tensor, output, average, _done[handle]), daemon=True).start()
        return handle

    def _average(task, tensor, output, average, done):
        torch.save(tensor.detach().clone(), FOLDER / f".{task}.{RANK}")
        (FOLDER / f".{task}.{RANK}").rename(FOLDER / f"{task}.{RANK}")
        theirs = [FOLDER / f"{task}.{rank}" for rank in range(SIZE)]
        while not all(path.exists() for path in theirs):
            time.sleep(0.001)
        total = sum(torch.load(path) for path in theirs)
        with torch.no_grad():
            output.copy_(total / SIZE if average else total)
        done.set()

    def byteps_torch_push_pull_group_sync_torch_FloatTensor(*args):
        return byteps_torch_push_pull_async_torch_FloatTensor(*args), 1

    def byteps_torch_poll(handle):
        return int(_done[handle].is_set())

    def byteps_torch_wait_and_clear(handle):
        _done.pop(handle).wait()

    def byteps_torch_set_num_grads(number):
        pass
"""

OPS = """
    from byteps.torch import c_lib
    from byteps.common import BytePSBasics as _BytePSBasics

    _basics = _BytePSBasics(__file__, "c_lib")
    init, shutdown, suspend, resume = _basics.init, _basics.shutdown, _basics.suspend, _basics.resume
    size, local_size, rank, local_rank = _basics.size, _basics.local_size, _basics.rank, _basics.local_rank
    _handle_map = {}

    def _do_push_pull_async(tensor, output, average, name, version=0, priority=0):
        function = "byteps_torch_push_pull_async_" + tensor.type().replace(".", "_")
        encoded = name.encode() if name is not None else ""
        handle = getattr(c_lib, function)(tensor, output, average, encoded, version, priority)
        _handle_map[handle] = (tensor, output)
        return handle

    def _do_push_pull_group_sync(tensor, output, average, name, version=0, priority=0):
        function = "byteps_torch_push_pull_group_sync_" + tensor.type().replace(".", "_")
        encoded = name.encode() if name is not None else ""
        handle, count = getattr(c_lib, function)(tensor, output, average, encoded, version, priority)
        _handle_map[handle] = (tensor, output)
        return handle, count

    def push_pull_async(tensor, average=True, name=None, version=0, priority=0):
        return _do_push_pull_async(tensor, tensor.new(tensor.shape), average, name, version, priority)

    def push_pull(tensor, average=True, name=None, version=0, priority=0):
        return synchronize(push_pull_async(tensor, average, name, version, priority))

    def push_pull_async_inplace(tensor, average=True, name=None, version=0, priority=0):
        return _do_push_pull_async(tensor, tensor, average, name, version, priority)

    def push_pull_group_sync_inplace(tensor, average=True, name=None, version=0, priority=0):
        return _do_push_pull_group_sync(tensor, tensor, average, name, version, priority)

    def push_pull_inplace(tensor, average=True, name=None, version=0, priority=0):
        return synchronize(push_pull_async_inplace(tensor, average, name, version, priority))

    def poll(handle):
        return c_lib.byteps_torch_poll(handle) != 0

    def declare(name):
        return 0

    def synchronize(handle):
        if handle not in _handle_map:
            return
        c_lib.byteps_torch_wait_and_clear(handle)
        return _handle_map.pop(handle)[1]
"""

PLUGIN = """
    import torch
    from byteps.torch.ops import push_pull_async_inplace as byteps_push_pull
    from byteps.torch.ops import push_pull, poll, synchronize, declare, init, shutdown, size, rank

    class _DistributedOptimizer(torch.optim.Optimizer):
        def __init__(self, params, named_parameters):
            super(self.__class__, self).__init__(params)
            self._names = {parameter: name for name, parameter in named_parameters}
            self._handles = {}
            for parameter in self._names:
                parameter.register_post_accumulate_grad_hook(self._push_pull_grad_async)

        def _push_pull_grad_async(self, parameter):
            name = "Gradient." + self._names[parameter]
            self._handles[parameter] = byteps_push_pull(parameter.grad, average=True, name=name)

        def step(self, closure=None):
            for handle in self._handles.values():
                synchronize(handle)
            self._handles.clear()
            return super(self.__class__, self).step(closure)

    def DistributedOptimizer(optimizer, named_parameters):
        name, base = optimizer.__class__.__name__, optimizer.__class__
        cls = type(name, (base,), dict(_DistributedOptimizer.__dict__))
        return cls(optimizer.param_groups, named_parameters)

    def broadcast_parameters(params, root_rank, prefix="Parameter."):
        for name, parameter in sorted(params.items()):
            if rank() != root_rank:
                parameter.fill_(0)
            synchronize(byteps_push_pull(parameter, average=False, name=prefix + name))
"""


def lay_out(folder: Path, sdist: Path | None = None) -> Path:
    """Write the package into *folder*, with the Python of *sdist* if there is one; return *folder*."""
    own = {"torch/ops.py": OPS, "torch/__init__.py": PLUGIN}
    files = {"__init__.py": "", "common/__init__.py": COMMON, "torch/c_lib.py": C_LIB, **({} if sdist else own)}
    for name, text in files.items():
        path = folder / "byteps" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for name in FROM_SDIST if sdist else ():
        (folder / "byteps" / name).write_text(source(sdist, name))
    return folder


def source(sdist: Path, name: str) -> str:
    """Return the text of a file of the package in *sdist*."""
    with tarfile.open(sdist) as packed:
        return packed.extractfile(f"byteps-{VERSION}/byteps/{name}").read().decode()


def download(folder: Path) -> Path | str:
    """Return the sdist, downloaded to *folder*, or why it cannot be had."""
    command = [sys.executable, "-m", "pip", "download", f"byteps=={VERSION}", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--retries", "1", "--disable-pip-version-check", "-q", "-d", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    except subprocess.TimeoutExpired:
        return "the sdist of byteps did not come within 100 s"
    found = list(folder.glob("*.tar.gz"))
    return found[0] if found else f"the sdist of byteps cannot be had: {done.stderr.strip().splitlines()[-1:]}"
