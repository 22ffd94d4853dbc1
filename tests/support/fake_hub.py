"""A local server of the Hugging Face Hub's API, for huggingface_hub and datasets, with faults on demand."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Optional

import pytest
from huggingface_hub import constants

from pretrainax.storage import hub
from tests.support.http_servers import body_of, running

_KINDS = {"models": "", "datasets": "datasets/"}
# Files that .gitattributes assigns to Git LFS.
_LARGE = re.compile(r"\.(safetensors|bin|model|png)$|tokenizer\.json$")


def _sha(content: bytes) -> str:
    """Returns the hash by which git names a regular file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Repository:
    """The files of each commit by name; branches and tags are names of commits."""

    def __init__(self):
        self.commits: dict[str, dict[str, bytes]] = {}
        self.references: dict[str, str] = {}
        self.gated = self.private = False
        self.listed: dict[str, int] = {}  # sizes in the listing, if they differ from the sizes of the files

    def commit(self, files: Mapping[str, bytes], reference: str = "main") -> str:
        """Adds a commit of only these files, and returns its name."""
        name = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[name] = dict(files)
        self.references[reference] = name
        return name

    def find(self, revision: str) -> Optional[str]:
        return revision if revision in self.commits else self.references.get(revision)


class FakeHub(http.server.ThreadingHTTPServer):
    """A server of repositories; `faults` are responses to the next requests of a path: (pattern, status, headers)."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}  # "org/name", "datasets/org/name"
        self.objects: dict[str, bytes] = {}  # the content of LFS, by SHA-256
        self.faults: list[tuple[str, int, dict[str, str]]] = []
        self.breaks: list[int] = []  # numbers of bytes after which the next downloads break off
        self.stops: dict[str, int] = {}  # number of bytes of a file after which the server sends nothing more
        self.stopped = False  # whether a client waits for a file in `stops`
        self.xet: dict[str, bytes] = {}  # the content that Xet offers, by SHA-256
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers
        self.tokens: set[str] = {"hf_known"}  # tokens of users with all permissions
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def repository(self, name: str) -> Repository:
        return self.repositories.setdefault(name, Repository())

    def fetched(self) -> list[str]:
        """Returns the paths that were downloaded."""
        return [path for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]

    def handle_error(self, *_) -> None:
        """Ignores the connection errors of clients that have disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*_)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *_) -> None:
        pass

    def _answer(self, status: int, content: object = b"", headers: Optional[dict[str, str]] = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = {} if isinstance(content, bytes) else {"Content-Type": "application/json"}
        for name, value in {"Content-Length": str(len(body)), **kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str, message: str) -> None:
        self._answer(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})

    def _begin(self) -> Optional[tuple[str, dict[str, str], bytes]]:
        """Returns path, query and body of a request, or None if a fault was the response."""
        body = body_of(self)
        path, _, query = self.path.partition("?")
        path = urllib.parse.unquote(path)
        with self.server.lock:
            self.server.requests.append((self.command, path, dict(self.headers)))
            found = next((fault for fault in self.server.faults if re.search(fault[0], path)), None)
            if found:
                self.server.faults.remove(found)
        if found:
            _, status, headers = found
            if status == 0:  # no response until the client has disconnected
                time.sleep(float(headers["seconds"]))
            else:
                self._answer(status, {"error": "a fault that the test has asked for"}, headers)
            return None
        return path, dict(urllib.parse.parse_qsl(query, keep_blank_values=True)), body

    @property
    def _token(self) -> Optional[str]:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _repository(self, name: str, is_listing: bool = False) -> Optional[Repository]:
        """Returns a repository that the client may read, or None after an error response as the hub sends it."""
        repository = self.server.repositories.get(name)
        if self._token is not None and self._token not in self.server.tokens:
            message = "Invalid credentials in Authorization header"
            self._answer(401, {"error": message}, {"X-Error-Message": message})
        elif repository is None or (repository.private and self._token is None):
            if self._token is None:  # the hub does not tell a client without login whether the repository exists
                self._answer(401, {"error": "Invalid username or password."})
            else:
                self._error(404, "RepoNotFound", "Repository not found")
        elif repository.gated and self._token is None and not is_listing:
            self._error(401, "GatedRepo", f"Access to {name} is restricted. You must have access to it.")
        else:
            return repository
        return None

    # --- reading

    def do_GET(self) -> None:
        if (asked := self._begin()) is None:
            return
        path, query, _ = asked
        if match := re.fullmatch(r"/api/(models|datasets)/([\w.-]+/[\w.-]+)(?:/(revision|tree)/(.+))?", path):
            kind, name, what, revision = match.groups()
            if (repository := self._repository(_KINDS[kind] + name, is_listing=True)) is None:
                return
            revision, _, folder = (
                (revision or "main").partition("/") if what == "tree" else (revision or "main", "", "")
            )
            if (commit := repository.find(revision)) is None:
                self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            elif what == "tree":
                self._answer(200, self._tree(repository, commit, folder, query.get("recursive", "").lower() == "true"))
            else:
                self._answer(200, self._described(name, repository, commit))
        elif match := re.fullmatch(
            r"/(datasets/)?([\w.-]+/[\w.-]+)/resolve/(.+?)/([^/]+|(?:data|\d_\w+|additional_chat_templates)/.+)", path
        ):
            self._resolve((match[1] or "") + match[2], match[3], match[4])
        else:
            self._error(404, "", "Not Found")

    do_HEAD = do_GET

    def _described(self, name: str, repository: Repository, commit: str) -> dict:
        files = repository.commits[commit]
        siblings = []
        for file, content in files.items():
            size = repository.listed.get(file, len(content))
            entry: dict = {"rfilename": file, "size": size, "blobId": _sha(content)}
            if _LARGE.search(file):
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": size, "pointerSize": 134}
            siblings.append(entry)
        return {"id": name, "sha": commit, "private": repository.private, "gated": repository.gated} | {
            "siblings": siblings,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "tags": [],
            "downloads": 0,
        }

    def _tree(self, repository: Repository, commit: str, folder: str, recursive: bool) -> list[dict]:
        found, folders = [], set()
        for file, content in repository.commits[commit].items():
            if folder and not file.startswith(f"{folder}/"):
                continue
            rest = file[len(folder) + 1 if folder else 0 :]
            if "/" in rest and not recursive:
                folders.add((f"{folder}/" if folder else "") + rest.split("/")[0])
                continue
            found.append({"type": "file", "path": file, "size": len(content), "oid": _sha(content)})
        return found + [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in sorted(folders)]

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if (repository := self._repository(name)) is None:
            return
        if (commit := repository.find(revision)) is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if (content := repository.commits[commit].get(file)) is None:
            return self._error(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "ETag": f'"{_sha(content)}"'}
        if _LARGE.search(file):
            digest = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{digest}"', "ETag": f'"{digest}"'}
            if digest in self.server.xet:
                headers |= {"X-Xet-Hash": digest, "X-Xet-Refresh-Route": f"{self.server.url}/api/xet-read-token"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(match[1]), int(match[2] or len(content) - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(content)) - 1}/{len(content)}"
            return self._answer(206, content[start:stop], headers)
        if self.command == "GET" and (stop := self.server.stops.get(file)) is not None:
            self._begin_of(content, stop, headers)
            self.server.stopped = True
            self.rfile.read(1)  # until the client has disconnected
        elif self.command == "GET" and self.server.breaks and (stop := self.server.breaks.pop(0)) < len(content):
            self._begin_of(content, stop, headers)
        else:
            self._answer(200, content, headers)

    def _begin_of(self, content: bytes, stop: int, headers: dict[str, str]) -> None:
        """Sends only the first bytes of the content."""
        self.send_response(200)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content[:stop])
        self.close_connection = True

    # --- writing

    def do_POST(self) -> None:
        if (asked := self._begin()) is None:
            return
        path, _, body = asked
        if self._token is None or self._token not in self.server.tokens:
            message = "Invalid username or password."
            return self._answer(401, {"error": message}, {"X-Error-Message": message})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/(.+?)/preupload/(.+)", path):
            return self._preupload(match[1], json.loads(body)["files"])
        if match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [self._batch(entry) for entry in json.loads(body)["objects"]]
            return self._answer(200, {"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/(.+?)/commit/(.+)", path):
            return self._commit(match[1], match[2], [json.loads(line) for line in body.splitlines() if line])
        self._error(404, "", "Not Found")

    def _create(self, wanted: dict) -> None:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if name.startswith("others/"):
            message = 'You don\'t have the rights to create a model under the namespace "others".'
            return self._answer(403, {"error": message}, {"X-Error-Message": message})
        if name in self.server.repositories:
            return self._answer(
                409, {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}
            )
        repository = self.server.repository(name)
        repository.private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        repository.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._answer(200, {"url": self._url(name), "name": name})

    def _url(self, name: str) -> str:
        return f"{self.server.url}/{name}"

    def _preupload(self, name: str, files: list[dict]) -> None:
        mode = lambda path: "lfs" if _LARGE.search(path) else "regular"  # noqa: E731
        described = [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False} for f in files]
        self._answer(200, {"files": described})

    def _batch(self, entry: dict) -> dict:
        if entry["oid"] in self.server.objects:
            return entry
        return entry | {"actions": {"upload": {"href": f"{self.server.url}/lfs/{entry['oid']}"}}}

    def do_PUT(self) -> None:
        if (asked := self._begin()) is None:
            return
        path, _, body = asked
        digest = path.removeprefix("/lfs/")
        if hashlib.sha256(body).hexdigest() != digest:
            return self._answer(400, {"error": "not the content that was announced"})
        self.server.objects[digest] = body
        self._answer(200)

    def _commit(self, name: str, branch: str, lines: list[dict]) -> None:
        repository = self.server.repositories[name]
        files = dict(repository.commits[repository.references[branch]])
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files, branch)
        self._answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})


def serving() -> contextlib.AbstractContextManager[FakeHub]:
    """Serves a hub without repositories."""
    return running(FakeHub())


@pytest.fixture
def hub_server(monkeypatch, tmp_path):
    """Serves a hub to the client of this process, with an empty cache."""
    with serving() as server:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # this hub does not offer Xet
        monkeypatch.delenv("HF_TOKEN", raising=False)
        forget(monkeypatch)
        yield server


def forget(monkeypatch) -> None:
    """Clears the caches of this process, so that it behaves like a new process."""
    monkeypatch.setattr(hub, "_models", {})
    monkeypatch.setattr(hub, "_folders", {})
