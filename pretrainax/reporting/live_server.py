"""Serves one page and its updates to the user of this machine over HTTP.

The server listens on 127.0.0.1 only. Other users and other programs of this machine can connect to it too, as can
JavaScript of any web page that the user opens. Therefore:

- The path starts with a random token of 256 bits. A request without it gets status 404, as any other path does.
- The Host header must name this server. After DNS rebinding, a foreign page would send its own host name.
- A path is never the name of a file: the server answers two paths with the results of two functions.
"""

import hmac
import http.server
import secrets
import sys
import urllib.parse
from collections.abc import Callable
from typing import NamedTuple

from pretrainax.config import UserError

ADDRESS = "127.0.0.1"
_REQUEST_SECONDS = 10.0  # time limit of a request, for clients that send nothing
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the page has the other directives
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # a referrer would contain the token
    "X-Content-Type-Options": "nosniff",
}


class Pages(NamedTuple):
    """Functions that render the answers to the two paths. A UserError is the answer to the request."""

    page: Callable[[], str]  # HTML, for TOKEN/
    data: Callable[[], str]  # JSON, for TOKEN/data


class LiveServer(http.server.ThreadingHTTPServer):
    """A server of one page; `serve_forever` answers requests until `shutdown`."""

    daemon_threads = True

    def __init__(self, pages: Pages, port: int):
        """Opens the port; 0 selects a free one.

        Raises:
          UserError: the port is in use, or belongs to the system.
        """
        self.pages, self.token = pages, secrets.token_urlsafe(32)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as e:
            raise UserError(f"--port={port} cannot be opened ({e.strerror}): use another one, or 0 for any") from e

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def handle_error(self, request, client_address) -> None:
        """Prints the traceback of an error, unless a client closed its connection during the answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveServer
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        hosts = (f"{ADDRESS}:{self.server.server_port}", f"localhost:{self.server.server_port}")
        token, _, name = urllib.parse.urlsplit(self.path).path.removeprefix("/").partition("/")
        has_token = hmac.compare_digest(token.encode(), self.server.token.encode())  # in constant time
        answers = {"": ("text/html", self.server.pages.page), "data": ("application/json", self.server.pages.data)}
        if not has_token or self.headers.get_all("Host") not in ([host] for host in hosts) or name not in answers:
            self._answer(404, "text/plain", "not found\n")
            return
        content_type, render = answers[name]
        try:
            self._answer(200, content_type, render())
        except UserError as e:
            self._answer(503, "text/plain", f"{e}\n")

    def _answer(self, status: int, content_type: str, text: str) -> None:
        body = text.encode()
        self.send_response_only(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Logs nothing, because a logged path contains the token."""
