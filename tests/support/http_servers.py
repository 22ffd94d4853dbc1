"""Shared code of the servers of the tests: a server thread, and chunked request bodies."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import TypeVar

Server = TypeVar("Server", bound=http.server.HTTPServer)


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Yields a server that runs until the context ends."""
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def body_of(request: http.server.BaseHTTPRequestHandler) -> bytes:
    """Reads the body of a request, of known length or chunked (RFC 9112, section 7.1)."""
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    pieces = []
    while size := int(request.rfile.readline(), 16):
        pieces.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(pieces)
