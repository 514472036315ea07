"""A small HTTP server in this process, for what downloads."""

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers of a subclass's do_GET, without a log."""

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(handler: type[Handler]) -> Iterator[str]:
    """The address of a server of this process."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
