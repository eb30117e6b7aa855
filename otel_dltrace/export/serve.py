"""Hands one file to a page in a browser on this machine, once."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import quote

from otel_dltrace.model.errors import DltraceError

PATIENCE_S = 2.0
"""Browsers open connections ahead of need: one on which nothing is asked for so long is closed, for the next."""


class _Server(HTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing: a page that went away asks again."""


def serve_once(path: Path, origin: str, port: int) -> None:
    """Serve *path* under its name on the loopback until somebody has read it; pages of *origin* may.

    Raises:
        DltraceError: The file cannot be read, or the port is taken.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DltraceError(f"{path} cannot be read: {error.strerror or error}") from None
    served = False
    hosts = (f"127.0.0.1:{port}", f"localhost:{port}", None)  # a browser always names one

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_S

        def do_GET(self) -> None:
            nonlocal served
            # Under another name a page may have found us that had its own name lead here (DNS rebinding).
            is_it = self.path == f"/{quote(path.name)}" and self.headers["Host"] in hosts
            body = content if is_it else b""
            self.connection.settimeout(None)  # who asked may read slowly
            self.send_response(200 if is_it else 404)
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            served = served or is_it

        def log_message(self, *_: object) -> None:
            """Say nothing: the terminal shows the address."""

    try:
        server = _Server(("127.0.0.1", port), Handler)
    except OSError as error:
        raise DltraceError(f"port {port} cannot be used ({error.strerror}): stop what uses it") from None
    with server:
        while not served:
            server.handle_request()
