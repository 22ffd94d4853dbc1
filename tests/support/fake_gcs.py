"""A local server of the JSON API of Cloud Storage, for fsspec's client, with faults on demand.

`python -m tests.support.fake_gcs [--delay=0.02]` serves gs://bucket and delays each response by this number of seconds.
It prints the environment variables with which other processes find the server.
"""

import argparse
import base64
import contextlib
import hashlib
import http.server
import json
import re
import signal
import sys
import threading
import time
import urllib.parse
from typing import Optional

from tests.support.http_servers import body_of, running

_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)")
_OBJECTS = re.compile(r"(?:/upload)?/storage/v1/b/([^/]+)/o/?")


class FakeGcs(http.server.ThreadingHTTPServer):
    """A server that stores buckets; the next requests get the statuses in `faults` as responses."""

    daemon_threads = True
    request_queue_size = 1024  # connections; a client beyond this limit retries a second later

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}  # "bucket/name" -> content, metadata
        self.uploads: dict[str, tuple[str, Optional[str], bytearray]] = {}
        self.buckets = {"bucket"}
        self.lock, self.generation = threading.Lock(), 1_000
        self.faults: list[int] = []
        self.forbids_writes = False
        self.delay = 0.0  # seconds before each answer
        self.requests = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_) -> None:
        """Ignores the connection errors of killed clients."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*_)

    def put(self, key: str, content: bytes, match: Optional[str]) -> Optional[dict]:
        """Writes an object and returns its metadata, or None if its generation differs from `match`."""
        with self.lock:
            there = self.objects.get(key)
            if match is not None and match != (there[1]["generation"] if there else "0"):
                return None
            self.generation += 1
            self.objects[key] = content, _metadata(key, content, self.generation)
            return self.objects[key][1]


def _metadata(key: str, content: bytes, generation: int) -> dict[str, str]:
    bucket, _, name = key.partition("/")
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(content)),
        "generation": str(generation),
        "etag": f"e{generation}",
        "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
        "updated": "2026-01-01T00:00:00.000Z",
        "timeCreated": "2026-01-01T00:00:00.000Z",
    }


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeGcs

    def log_message(self, *_) -> None:
        pass

    def _answer(self, status: int, content: object = b"", headers: Optional[dict] = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, message: str) -> None:
        self._answer(status, {"error": {"code": status, "message": message}})

    def _begin(self) -> Optional[tuple[str, dict[str, str], bytes]]:
        """Returns path, query and body of a request, or None if a fault was the response."""
        body = body_of(self)
        server = self.server
        server.requests += 1
        time.sleep(server.delay)
        with server.lock:
            fault = server.faults.pop(0) if server.faults else 0
        if fault:
            self._error(fault, "a fault that the test has asked for")
            return None
        path, _, query = self.path.partition("?")
        if server.forbids_writes and self.command in ("POST", "PUT", "DELETE"):
            self._error(403, "does not have storage.objects.create access")
            return None
        return path, dict(urllib.parse.parse_qsl(query, keep_blank_values=True)), body

    def do_GET(self) -> None:
        if (asked := self._begin()) is None:
            return
        path, query, _ = asked
        if match := _OBJECT.fullmatch(path):
            self._get(f"{match[1]}/{urllib.parse.unquote(match[2])}", query.get("alt") == "media")
        elif (match := _OBJECTS.fullmatch(path)) and match[1] in self.server.buckets:
            self._list(match[1], query.get("prefix", ""), query.get("delimiter", ""))
        else:
            self._error(404, "not found")

    def _get(self, key: str, is_media: bool) -> None:
        with self.server.lock:
            if key not in self.server.objects:
                return self._error(404, "not found")
            content, metadata = self.server.objects[key]
        if not is_media:
            return self._answer(200, metadata)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(match[1]), int(match[2] or len(content) - 1) + 1
            return self._answer(206, content[start:stop], {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"})
        self._answer(200, content, {"X-Goog-Hash": f"md5={metadata['md5Hash']}"})

    def _list(self, bucket: str, prefix: str, delimiter: str) -> None:
        items, prefixes = [], set()
        with self.server.lock:
            for key in sorted(self.server.objects):
                of, _, name = key.partition("/")
                if of == bucket and name.startswith(prefix):
                    rest = name[len(prefix) :]
                    if delimiter and delimiter in rest:
                        prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
                    else:
                        items.append(self.server.objects[key][1])
        self._answer(200, {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def do_POST(self) -> None:
        if (asked := self._begin()) is None:
            return
        path, query, body = asked
        if "upload_id" in query:
            return self._continue(query["upload_id"], body)
        match = _OBJECTS.fullmatch(path)
        if not match or match[1] not in self.server.buckets:
            return self._error(404, "the bucket does not exist")
        if query.get("uploadType") == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            upload = str(len(self.server.uploads) + 1)
            self.server.uploads[upload] = f"{match[1]}/{name}", query.get("ifGenerationMatch"), bytearray()
            where = f"{self.server.url}/upload/storage/v1/b/{match[1]}/o?uploadType=resumable&upload_id={upload}"
            return self._answer(200, {}, {"Location": where})
        boundary = b"--" + re.search(r"boundary=[\"']*([^\"';]+)", self.headers["Content-Type"])[1].encode()
        _, described, rest = body.split(boundary, 2)
        name = json.loads(described.split(b"\n\n", 1)[1])["name"]
        content = rest.split(b"\n\n", 1)[1].rpartition(b"\n" + boundary)[0]
        self._written(f"{match[1]}/{name}", content, query.get("ifGenerationMatch"))

    def _continue(self, upload: str, body: bytes) -> None:
        key, match, received = self.server.uploads[upload]
        received += body
        total = self.headers["Content-Range"].rpartition("/")[2]
        if total != "*" and len(received) == int(total):
            self._written(key, bytes(received), match)
        else:
            self._answer(308, b"", {"Range": f"bytes=0-{len(received) - 1}"})

    def _written(self, key: str, content: bytes, match: Optional[str]) -> None:
        metadata = self.server.put(key, content, match)
        if metadata is None:
            return self._error(412, "At least one of the pre-conditions you specified did not hold.")
        self._answer(200, metadata)

    def do_DELETE(self) -> None:
        if (asked := self._begin()) is None:
            return
        match = _OBJECT.fullmatch(asked[0])
        with self.server.lock:
            gone = match and self.server.objects.pop(f"{match[1]}/{urllib.parse.unquote(match[2])}", None)
        if gone:
            self._answer(204)
        else:
            self._error(404, "not found")


def serving() -> contextlib.AbstractContextManager[FakeGcs]:
    """Serves one empty bucket, `bucket`."""
    return running(FakeGcs())


def environment(url: str) -> dict[str, str]:
    """Returns the environment variables with which fsspec finds a server at gs://."""
    # gcsfs queries the type of the bucket by gRPC, at an address that cannot be set.
    return {"FSSPEC_GS_ENDPOINT_URL": url, "FSSPEC_GS_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    with serving() as server:
        server.delay = parser.parse_args().delay
        print("export", *(f"{name}={value}" for name, value in environment(server.url).items()), flush=True)
        signal.pause()
