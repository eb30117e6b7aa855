"""Acts a pod out as processes: what a kubelet would do with a manifest, on one host.

Environment, commands, volumes, users, probes and the order of things come from the manifest. What a pod has to itself
on a node, and processes here share, is translated: its file system (a folder for each volume, a program for
each image) and its network (a free port for each port).
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import LONG_S
from tests.support.servers import free_port, program, wait_until

_PYTHON = sys.executable
ENTRYPOINTS = {"otel-dltrace/drain": ["otel-dltrace"], "otel/opentelemetry-collector-contrib": ["otelcol"]}
"""What images start by themselves."""
_PATH = f"{Path(_PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
_CHATTER = re.compile(r"^\S+\tinfo\t.*\n", re.MULTILINE)
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


@dataclass(frozen=True)
class Around:
    """What a pod finds around it.

    Attributes:
        objects: The objects of its namespace: ConfigMaps and Secrets are looked for there.
        places: Addresses and folders of images that the manifests name, and what stands for them here.
        env: Variables that a controller, or a user's patch, adds to the main container.
        args: Arguments that a user adds to it.
        sidecars: Variables for the sidecars.
        metadata: What a controller puts into the pod's metadata.
    """

    objects: Sequence[Mapping[str, Any]]
    places: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    args: Sequence[str] = ()
    sidecars: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Pod:
    """A pod of *template*, its volumes in *folder*."""

    def __init__(self, template: Mapping[str, Any], around: Around, folder: Path) -> None:
        self._spec, self._around, self._folder = template["spec"], around, folder
        labels = {**template["metadata"].get("labels", {}), **around.metadata.get("labels", {})}
        self._metadata = {"name": folder.name, "namespace": "test", "uid": f"uid-{folder.name}", **around.metadata}
        self._metadata["labels"] = labels
        self._group = self._spec.get("securityContext", {}).get("fsGroup")
        self._memory = Path(tempfile.mkdtemp(prefix="dltrace-pod-", dir="/dev/shm"))
        self._memory.chmod(0o755)
        self.health = free_port()
        self.volumes = {volume["name"]: self._make(volume) for volume in self._spec["volumes"]}
        self.sidecars: list[subprocess.Popen[bytes]] = []
        self.main: subprocess.Popen[bytes] | None = None

    # -- volumes --------------------------------------------------------------------------------

    def _make(self, volume: Mapping[str, Any]) -> Path:
        """Make a volume's folder, as a kubelet does: of the pod's group, setgid."""
        if "configMap" in volume:
            return self._files(volume)
        parent = self._folder / "volumes"
        if volume["emptyDir"].get("medium") == "Memory":
            parent = self._memory
        path = parent / volume["name"]
        path.mkdir(parents=True)
        if os.geteuid() == 0 and self._group is not None:
            os.chown(path, 0, self._group)
        path.chmod(0o2777)
        return path

    def _files(self, volume: Mapping[str, Any]) -> Path:
        path = self._folder / "volumes" / volume["name"]
        path.mkdir(parents=True)
        for name, text in self._find("ConfigMap", volume["configMap"]["name"])["data"].items():
            (path / name).write_text(text)
        return path

    def _find(self, kind: str, name: str) -> Mapping[str, Any]:
        return next(o for o in self._around.objects if (o["kind"], o["metadata"]["name"]) == (kind, name))

    # -- containers -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the containers in their order: init containers end, sidecars are ready, then comes the main one."""
        for container in self._spec.get("initContainers", []):
            process = self._start(container, self._around.sidecars)
            if container.get("restartPolicy") == "Always":
                self.sidecars.append(process)
                wait_until(lambda c=container, p=process: self._has_started(c, p), what=f"{container['name']} starting")
            else:
                assert process.wait(240) == 0, self.log(container["name"])
        (container,) = self.containers
        self.main = self._start(container, self._around.env, self._around.args)

    @property
    def containers(self) -> list[dict[str, Any]]:
        """The main containers."""
        found: list[dict[str, Any]] = self._spec["containers"]
        return found

    def command(
        self, container: Mapping[str, Any], more: Mapping[str, str] | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """Return what *container* runs, and its environment."""
        env = self._environment(container, more or {})
        image = container["image"].rpartition(":")[0]
        words = [*container.get("command", ENTRYPOINTS.get(image, [])), *container.get("args", [])]
        return [self._here(container, _expand(word, env)) for word in words], env

    def _start(
        self, container: Mapping[str, Any], more: Mapping[str, str], args: Sequence[str] = ()
    ) -> "subprocess.Popen[bytes]":
        words, env = self.command(container, more)
        command = program(words[0]) if words[0] == "otelcol" else words[0]
        with (self._folder / f"{container['name']}.log").open("ab") as log:
            return subprocess.Popen(
                [shutil.which(command, path=_PATH), *words[1:], *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={"PATH": _PATH, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **env},
                **self._user(container),
            )

    def _environment(self, container: Mapping[str, Any], more: Mapping[str, str]) -> dict[str, str]:
        env: dict[str, str] = {}
        for entry in container.get("env", []):
            text = self._value(entry["valueFrom"]) if "valueFrom" in entry else _expand(entry["value"], env)
            env[entry["name"]] = text
        return {name: self._here(container, text) for name, text in env.items()} | dict(more)

    def _value(self, source: Mapping[str, Any]) -> str:
        """Return what the downward API, a ConfigMap or a Secret says."""
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            if found := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
                return str(self._metadata["labels"].get(found[1], ""))
            known = {f"metadata.{name}": str(value) for name, value in self._metadata.items()}
            return {"spec.nodeName": "node-a", "status.podIP": "127.0.0.1", **known}[path]
        if "secretKeyRef" in source:
            return str(
                self._find("Secret", source["secretKeyRef"]["name"])["stringData"][source["secretKeyRef"]["key"]]
            )
        reference = source["configMapKeyRef"]
        return str(self._find("ConfigMap", reference["name"])["data"][reference["key"]])

    def _here(self, container: Mapping[str, Any], text: str) -> str:
        """Return *text* with the folders of volumes and the addresses that stand for those it names."""
        mounts = {mount["mountPath"]: str(self.volumes[mount["name"]]) for mount in container.get("volumeMounts", [])}
        names = {**mounts, **self._around.places, ":13133": f":{self.health}"}
        pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        return re.sub(rf"({pattern})(?![\w.-])", lambda found: names[found[1]], text)

    def _user(self, container: Mapping[str, Any]) -> dict[str, Any]:
        """Return as whom the container runs, where we may choose."""
        security = {**self._spec.get("securityContext", {}), **container.get("securityContext", {})}
        user = security.get("runAsUser")
        if user is None or not _may_be(user) or container["image"].startswith("otel/"):
            return {}
        return {"user": user, "group": security["runAsGroup"], "extra_groups": [self._group]}

    def _has_started(self, container: Mapping[str, Any], process: "subprocess.Popen[bytes]") -> bool:
        assert process.poll() is None, self.log(container["name"])
        probe = container.get("startupProbe")
        if probe is None:
            return True
        if "exec" in probe:
            command = [self._here(container, word) for word in probe["exec"]["command"]]
            return subprocess.run(command, check=False, **self._user(container)).returncode == 0
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health}{probe['httpGet']['path']}", timeout=5):
                return True
        except OSError:
            return False

    # -- the end --------------------------------------------------------------------------------

    def wait(self, timeout: float = LONG_S) -> int:
        """Wait for the main container; return its exit code."""
        assert self.main is not None
        try:
            return self.main.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the main container goes on\n{self.logs()}") from None

    def kill_main(self) -> None:
        """Kill every process of the main container, as the kernel does when its memory is used up."""
        assert self.main is not None
        for process in [*psutil.Process(self.main.pid).children(recursive=True), psutil.Process(self.main.pid)]:
            process.kill()
        self.main.wait()

    def end_sidecars(self) -> list[int]:
        """End the sidecars as a kubelet does once the main container is gone: the last first; return exit codes."""
        codes = []
        while self.sidecars:
            process = self.sidecars.pop()
            process.send_signal(signal.SIGTERM)
            try:
                codes.append(process.wait(self._spec["terminationGracePeriodSeconds"]))
            except subprocess.TimeoutExpired:
                self.sidecars.append(process)
                raise AssertionError(f"a sidecar does not end\n{self.logs()}") from None
        return codes

    def log(self, name: str) -> str:
        """Return what a container has said."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        """Return the ends of what the containers have said, but for what a collector says all the time."""
        texts = {path.stem: path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log"))}
        return "\n".join(f"== {name}\n{re.sub(_CHATTER, '', text)[-3000:]}" for name, text in texts.items())

    def clean_up(self) -> None:
        """Leave no process and no memory behind."""
        for process in [*self.sidecars, *filter(None, [self.main])]:
            with suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()
        shutil.rmtree(self._memory, ignore_errors=True)


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Return *text* with its ``$(NAME)``; one that is not known stays, as in Kubernetes."""
    return _REFERENCE.sub(lambda found: env.get(found[1], found[0]), text)


@cache
def _may_be(user: int) -> bool:
    """Return whether a process of *user* could run our Python: it needs root, and files that all may read."""
    if os.geteuid() != 0:
        return False
    command = [_PYTHON, "-c", "import otel_dltrace.export.drain"]
    try:
        done = subprocess.run(
            command, user=user, group=user, extra_groups=[], capture_output=True, check=False, cwd="/"
        )
    except PermissionError:
        return False
    return done.returncode == 0


class Stage:
    """Pods that are acted out together, in one folder that all users may look into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: list[Pod] = []

    def pod(self, name: str, template: Mapping[str, Any], around: Around) -> Pod:
        """Return a pod that has been started."""
        (pod,) = self.run({name: (template, around)})
        return pod

    def run(self, wanted: Mapping[str, tuple[Mapping[str, Any], Around]]) -> list[Pod]:
        """Return pods that have been started, all at once: templates and surroundings by name."""
        pods = []
        for name, (template, around) in wanted.items():
            folder = self.folder / name
            folder.mkdir()
            folder.chmod(0o777)
            pods.append(Pod(template, around, folder))
        self.pods += pods
        with ThreadPoolExecutor(len(pods)) as kubelets:
            list(kubelets.map(Pod.start, pods))
        return pods


@contextmanager
def stage() -> Iterator[Stage]:
    """Give a stage; end what is on it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="dltrace-pods-"))  # pytest's own folders are closed to other users
    folder.chmod(0o755)
    found = Stage(folder)
    try:
        yield found
    finally:
        for pod in reversed(found.pods):
            pod.clean_up()
        shutil.rmtree(folder, ignore_errors=True)
