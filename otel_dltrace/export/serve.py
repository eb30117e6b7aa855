"""Hands one file to a page in a browser on this machine, once."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import quote

from otel_dltrace.model.errors import DltraceError


def serve_once(path: Path, origin: str, port: int) -> None:
    """Serve *path* under its name on the loopback until somebody has read it; pages of *origin* may.

    Raises:
        DltraceError: The port is taken.
    """
    served = False

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal served
            is_it = self.path == f"/{quote(path.name)}"
            body = path.read_bytes() if is_it else b""
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
        server = HTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise DltraceError(f"port {port} cannot be used ({error.strerror}): end what uses it") from None
    with server:
        while not served:
            server.handle_request()
