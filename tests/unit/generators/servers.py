"""HTTP servers in a thread, for code that talks to a service."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Calls `answer` for every request; reads and writes JSON, and prints nothing."""

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_GET  # noqa: N815

    def answer(self) -> None:
        raise NotImplementedError

    def read(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, content: Any, *, status: int = 200) -> None:
        """Send bytes as they are, anything else as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None: ...


class _Server(ThreadingHTTPServer):
    request_queue_size = 200
    daemon_threads = True


@contextmanager
def serve(handler: type[Handler], *, port: int = 0) -> Iterator[str]:
    with _Server(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
