"""A proxy for a local server of a store, which responds to some requests with a fault."""

import contextlib
import http.client
import http.server
import random
import sys
import time
import urllib.parse
from collections.abc import Callable
from typing import Optional

from tests.support.fake_gcs import FakeGcs
from tests.support.http_servers import body_of, running

DROPPED = 0  # in place of a status: the proxy closes the connection without a response
_OWN = {"connection", "transfer-encoding", "content-length", "host"}  # headers that belong to one connection
_BODY = (
    '<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>',
    '{{"error": {{"code": {status}, "message": "{code}: {message}"}}}}',
)
_CODES = {429: "TooManyRequests", 503: "SlowDown", 504: "Timeout", 403: "AccessDenied", 507: "QuotaExceeded"}
_CODES |= {404: "NoSuchKey", 412: "PreconditionFailed", 500: "InternalError"}


class FaultyProxy(http.server.ThreadingHTTPServer):
    """Forwards requests; `fault` maps a method to None, to the status of an error response, or to DROPPED."""

    daemon_threads = True
    request_queue_size = 1024  # connections; a client beyond this limit retries a second later

    def __init__(self, upstream: str, is_xml: bool):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.is_xml = urllib.parse.urlparse(upstream).netloc, is_xml
        self.faults = 0  # number of faults sent as responses
        self.gcs: Optional[FakeGcs] = None  # the server behind the proxy, if it is a `FakeGcs`
        self.mend()

    def mend(self) -> None:
        """Forwards all further requests unchanged."""
        self.fault: Callable[[str], Optional[int]] = lambda method: None
        self.delay = 0.0  # maximum number of seconds before a response
        self.changed: Callable[[bytes], bytes] = lambda body: body  # replaces the body of a response
        # Number of bytes by which the stated length of a response exceeds its body. If it is negative, the body is cut.
        self.longer: Callable[[int], int] = lambda size: 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_) -> None:
        """Ignores the connection errors of killed clients."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*_)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def log_message(self, *_) -> None:
        pass

    def _pass_on(self) -> None:
        body = body_of(self)
        time.sleep(random.uniform(0, self.server.delay))
        if (status := self.server.fault(self.command)) is not None:
            self.server.faults += 1
            return self._fail(status)
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = self.server.changed(answer.read())
            longer = self.server.longer(len(content))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in {*_OWN, "date", "server"}:
                    self.send_header(name, value)
            size = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", size or str(len(content) + max(longer, 0)))
            self.end_headers()
            self.wfile.write(content[: len(content) + min(longer, 0)])
            self.close_connection = self.close_connection or longer != 0

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _pass_on

    def _fail(self, status: int) -> None:
        self.close_connection = True
        if status == DROPPED:
            return
        code = _CODES[status]
        message = "a fault that was asked for"
        body = _BODY[not self.server.is_xml].format(code=code, message=message, status=status).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml" if self.server.is_xml else "application/json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def before(upstream: str, is_xml: bool) -> contextlib.AbstractContextManager[FaultyProxy]:
    """Serves a proxy for the server at a URL; its errors have the format of S3 if `is_xml`, else of Cloud Storage."""
    return running(FaultyProxy(upstream, is_xml))
