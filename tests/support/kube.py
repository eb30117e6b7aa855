"""A real Kubernetes API for tests, without nodes: etcd and kube-apiserver on the loopback, and kubectl to ask them."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.paths import ROOT
from tests.support.servers import free_port, program, wait_until

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
_CRDS = ROOT.parent / "shared" / "crds"
_TOKEN = "test"


@cache
def rendered(folder: Path) -> str:
    """Return what ``kubectl kustomize`` makes of *folder*."""
    return subprocess.run([program("kubectl"), "kustomize", folder], capture_output=True, text=True, check=True).stdout


def objects(folder: Path) -> list[dict[str, Any]]:
    """Return the objects of *folder*."""
    return list(yaml.safe_load_all(rendered(folder)))


def overlay(name: str) -> list[dict[str, Any]]:
    """Return the objects of an overlay."""
    return objects(KUBERNETES / "overlays" / name)


def pod_templates(found: Any) -> list[dict[str, Any]]:
    """Return every pod template within *found*, whatever kind of job holds it."""
    if isinstance(found, list):
        return [template for item in found for template in pod_templates(item)]
    if not isinstance(found, dict):
        return []
    if "containers" in found.get("spec", {}) and "schedule" not in found:
        return [found]
    return [template for value in found.values() for template in pod_templates(value)]


@dataclass
class Cluster:
    """A running API server."""

    address: str
    folder: Path

    def kubectl(self, *args: str, given: Any = None) -> "subprocess.CompletedProcess[str]":
        """Run kubectl; *given* are objects for its standard input."""
        access = [f"--server={self.address}", f"--token={_TOKEN}", "--insecure-skip-tls-verify"]
        text = None if given is None else yaml.safe_dump_all(given)
        command = [program("kubectl"), *access, *args]
        env = {**os.environ, "KUBECONFIG": os.devnull, "HOME": str(self.folder)}
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=env)

    def do(self, *args: str, given: Any = None) -> str:
        """Run kubectl, which must succeed; return what it printed."""
        done = self.kubectl(*args, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, namespace: str, kind: str) -> list[dict[str, Any]]:
        """Return the objects of *kind* that the API server keeps."""
        items: list[dict[str, Any]] = json.loads(self.do("get", kind, "-n", namespace, "-o", "json"))["items"]
        return items


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Run an API server that knows the kinds of job that we write for.

    Args:
        folder: Where its data, keys and logs go.
    """
    if not _CRDS.is_dir():
        pytest.skip(f"the kinds of job are not there: {_CRDS}")
    etcd, peers, api = (free_port() for _ in range(3))
    client = f"http://127.0.0.1:{etcd}"
    peer = f"http://127.0.0.1:{peers}"
    key = folder / "sa.key"
    key.write_bytes(_private_key())
    (folder / "tokens.csv").write_text(f"{_TOKEN},admin,admin,system:masters\n")
    keeper = [program("etcd"), "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--listen-client-urls", client]
    keeper += ["--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    keeper += ["--initial-cluster", f"default={peer}"]
    server = [program("kube-apiserver"), f"--etcd-servers={client}", "--bind-address=127.0.0.1"]
    server += [f"--secure-port={api}", f"--cert-dir={folder / 'certs'}", "--authorization-mode=RBAC"]
    server += ["--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}"]
    server += [f"--service-account-signing-key-file={key}", f"--token-auth-file={folder / 'tokens.csv'}"]
    server += ["--service-cluster-ip-range=10.0.0.0/24", "--disable-admission-plugins=ServiceAccount"]
    found = Cluster(f"https://127.0.0.1:{api}", folder)
    with _running(keeper, folder / "etcd.log"), _running(server, folder / "kube-apiserver.log"):
        wait_until(lambda: found.kubectl("get", "--raw", "/readyz").returncode == 0, what="the API server")
        found.do("apply", "--server-side", "-f", str(_CRDS))
        found.do("wait", "--for=condition=Established", "crd", "--all", "--timeout=240s")
        yield found


def _private_key() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


@contextmanager
def _running(command: list[Any], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
