"""A receiver of OTLP over HTTP that accepts everything and drops it, in a process of its own, for `bench_wire`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Drop(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a connection is kept, as with a collector

    def do_POST(self) -> None:
        """Read the request, accept it."""
        left = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, 1 << 16)))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  -- its name in the standard library
        """Say nothing."""


@contextmanager
def receiver() -> Iterator[str]:
    """Have one; yield the URL that it takes traces at."""
    command = [sys.executable, "-m", "benchmarks._receiver"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces"
        finally:
            process.kill()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Drop)
    print(server.server_address[1], flush=True)
    server.serve_forever()
