"""Downloads models from the Hugging Face Hub (`hf:org/name@revision`) to a local folder, and uploads exports.

The package huggingface_hub sends the requests, resumes interrupted transfers, and stores files in its cache, which
other programs also use. Its variables HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN apply. This module selects the
files: safetensors, JSON and tokenizer files of the top folder, no pickle files and no code. Each file must have the
size that the hub lists. `folder_of` downloads the small files: the configs and the tokenizer. `download_weights`
downloads the weights.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import logging
import os
import random
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import NamedTuple, NoReturn, Optional, TypeVar

from pretrainax.config import RunFailed, UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import read_object
from pretrainax.files.object_names import path_below
from pretrainax.files.paths import HUB, HubName, hub_name, path_problem
from pretrainax.files.regular_files import MOST_BYTES
from pretrainax.storage.store import print_message

PATIENCE = 120.0  # seconds for which a request is repeated while the hub is busy
_FIRST, _LONGEST = 1.0, 20.0  # seconds between two requests: initial and maximum
_TIMEOUT = 10.0  # seconds for a response
_PARALLEL = 8  # files that are downloaded at the same time
_BUSY = (408, 429, 500, 502, 503, 504)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Configs and tokenizers: no hidden files, no files in folders except config.json of sentence-transformers modules.
_SMALL = re.compile(
    r"\w[\w.-]*\.(json|model)|(vocab|merges|words)\.txt|chat_template\.jinja|manifest\.sha256|\d_[A-Za-z]+/config\.json",
    re.ASCII,
)
_SINGLE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PICKLED = re.compile(r"[^/]*\.(bin|pt|pth|ckpt|h5|msgpack|pkl)")

# Texts in the error messages of the package datasets, which omits the hub's response -> error code of the hub.
_DATASET_ERRORS = (("is a gated dataset", "GatedRepo"), ("doesn't exist on the Hub", "RepoNotFound"))

T = TypeVar("T")


@dataclasses.dataclass
class _Model:
    """A model of the hub at one commit."""

    given: str  # the path that the user gave: "hf:org/name@main"
    name: HubName
    commit: str
    folder: str  # cache folder of the files of this commit
    sizes: Optional[Mapping[str, int]]  # bytes of each file on the hub; None: the hub did not respond
    has_weights: bool = False  # the folder has all weights

    @property
    def exact(self) -> str:
        return f"{HUB}{self.name.repository}@{self.commit}"


_models: dict[str, _Model] = {}  # by `given`; a path refers to the same commit until the process exits
_folders: dict[str, _Model] = {}  # by `folder`


class _Response(NamedTuple):
    """Status and headers of a response of the hub."""

    status_code: int
    headers: Mapping[str, str]


class _Unreachable(Exception):
    """Raised if the hub cannot be reached or is busy for too long; the message contains the reason."""


def folder_of(path: str) -> str:
    """Downloads the configs and the tokenizer of a hub model; returns the cache folder of the model.

    Without a network, or with HF_HUB_OFFLINE=1, returns the folder of the cached copy and prints its commit.

    Raises:
      UserError: the model or revision does not exist, or this user has no access to it; the message has a remedy.
      RunFailed: the hub does not respond and the cache has no copy, the disk is full, or a transfer was interrupted.
    """
    if path not in _models:
        if problem := path_problem(path, takes_hub=True):
            raise UserError(f"{path}: {problem}")
        model = _resolved(path)
        _download(model, [name for name in model.sizes or () if _SMALL.fullmatch(name)], "its configs and tokenizer")
        _remember(model)
        _models[path] = _folders[model.folder] = model
    return _models[path].folder


def pinned_name(path: str) -> str:
    """Returns a hub path with its current commit as the revision, hf:org/name@1a2b…; its files never change."""
    folder_of(path)
    return _models[path].exact


def download_weights(folder: str) -> None:
    """Downloads the weights of a hub model to its cache folder; does nothing for all other folders.

    Raises:
      UserError: the model has no safetensors files, for example only pickle files.
      RunFailed: for the same reasons as `folder_of`.
    """
    model = _folders.get(os.path.abspath(folder))
    if model is None or model.has_weights:
        return
    names = _weights(model, os.listdir(model.folder) if model.sizes is None else model.sizes)
    missing = [name for name in names if _bytes_here(model, name) is None]
    if missing and model.sizes is None:
        raise RunFailed(
            f"{model.given}: the cache has a part of it, without {', '.join(missing[:3])}, and the hub is not reached: "
            "run the same command again with a network and without HF_HUB_OFFLINE"
        )
    if model.sizes is not None:
        _download(model, names, "its weights")
    model.has_weights = True


def _weights(model: _Model, listed: "Mapping[str, int] | list[str]") -> list[str]:
    """Returns the names of a model's safetensors files, as in `interop.safetensors_files`; UserError if it has none."""
    index = os.path.join(model.folder, _INDEX)
    files = [name for name in (_SINGLE, _ADAPTER) if name in listed]
    if _SINGLE not in listed and _INDEX in listed and os.path.exists(index):
        shards = read_object(index).get("weight_map")
        files += sorted({str(name) for name in (shards.values() if isinstance(shards, dict) else ())})
    if odd := [name for name in files if not _SHARD.fullmatch(name)]:
        raise UserError(
            f"{model.given}: {_INDEX} names the file {odd[0]!r}; it must be a safetensors file in the same folder"
        )
    if files or model.sizes is None:
        return files or [_SINGLE]
    pickled = sorted(name for name in listed if _PICKLED.fullmatch(name))
    content = f"holds {', '.join(pickled[:3])} and no safetensors" if pickled else "holds no safetensors"
    advice = (
        ": such files can run code when they are opened, so they are never fetched. Use a revision with safetensors, "
        f"for example {HUB}{model.name.repository}@refs/pr/1 if the hub's page lists one under Community; or, if you "
        f"trust the files, convert them with transformers: {conversion_command(model.folder, model.name.repository)}"
    )
    raise UserError(f"{model.given} {content}{advice if pickled else ': use a model with safetensors'}")


def conversion_command(folder: str, source: str) -> str:
    """Returns a shell command that converts pickled weights to safetensors with transformers.

    Args:
      folder: folder with the config.json of the model.
      source: name or path of the model for transformers.
    """
    config = os.path.join(folder, "config.json")
    classes = read_object(config).get("architectures") if os.path.exists(config) else None
    # The class name is untrusted, and users paste it into a shell.
    name = classes[0] if isinstance(classes, list) and classes and str(classes[0]).isidentifier() else "AutoModel"
    return (
        f'python -c "from transformers import {name} as M; '
        f"M.from_pretrained('{source}').save_pretrained('converted')\", and copy its tokenizer's files there"
    )


# --- resolving -------------------------------------------------------------------------------------------------------


def _resolved(path: str) -> _Model:
    """Returns the model of a hub path at its current commit, or at the cached commit if the hub does not respond."""
    name = hub_name(path)
    assert name is not None
    hub = _library(path)
    query = {"revision": name.revision, "timeout": _TIMEOUT, "files_metadata": True}
    try:
        with show_client_log():
            info = _request(path, lambda: hub.HfApi().model_info(name.repository, **query))
    except _Unreachable as e:
        return _cached(path, name, str(e))
    if not _COMMIT.fullmatch(info.sha or ""):  # the commit becomes part of a path
        raise UserError(f"{path}: {hub.constants.ENDPOINT} is not a hub: its commit is {info.sha!r}")
    sizes = {file.rfilename: file.size for file in info.siblings or () if file.size is not None}
    return _Model(path, name, info.sha, _snapshot(name, info.sha), sizes)


def _cached(path: str, name: HubName, why: str) -> _Model:
    hub = _library(path)
    try:
        commit = hub.HfApi().resolve_revision(name.repository, revision=name.revision, local_files_only=True).resolved
    except hub.errors.RevisionResolutionError:
        commit = ""
    if not commit or not os.path.isdir(folder := _snapshot(name, commit)):
        raise RunFailed(
            f"{path}: the hub cannot be reached ({why}), and the cache of this machine does not have it: run the same "
            "command once with a network, or set a folder"
        )
    print_message(f"{path}: the hub is not reached ({why}); using the copy of commit {commit[:12]} in the cache")
    return _Model(path, name, commit, folder, None)


def _remember(model: _Model) -> None:
    """Writes the commit of the model's revision to the cache of huggingface_hub, for later use without a network."""
    revision = model.name.revision or "main"
    reference = path_below(os.path.join(os.path.dirname(os.path.dirname(model.folder)), "refs"), revision)
    if model.sizes is not None and revision != model.commit:
        with contextlib.suppress(OSError):  # the cache is read-only
            os.makedirs(os.path.dirname(reference), exist_ok=True)
            write_atomically(reference, model.commit)


def _snapshot(name: HubName, commit: str) -> str:
    """Returns the cache folder of a model at a commit; the folder may not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    of_repository = repo_folder_name(repo_id=name.repository, repo_type="model")
    return os.path.join(
        os.path.realpath(os.path.expanduser(constants.HF_HUB_CACHE)), of_repository, "snapshots", commit
    )


# --- downloads -------------------------------------------------------------------------------------------------------


def _download(model: _Model, names: list[str], what: str) -> None:
    """Downloads the files `names` of a model if the cache lacks them; prints their total size.

    Files other than weights with more than MOST_BYTES bytes are skipped with a message. Raises UserError if the hub
    does not list a file, and RunFailed if the disk has not enough space or a transfer fails.

    what: description of the files for the message, such as "its weights".
    """
    sizes, hub = model.sizes or {}, _library(model.given)
    if unlisted := [name for name in names if name not in sizes]:
        raise UserError(f"{model.given} does not hold {', '.join(unlisted[:3])}, but its {_INDEX} names them")
    for name in (name for name in names if not _SHARD.fullmatch(name) and sizes[name] > MOST_BYTES):
        print_message(f"{model.given}: {name} is skipped: it has {sizes[name]:,} bytes, the limit is {MOST_BYTES:,}")
    names = [name for name in names if _SHARD.fullmatch(name) or sizes[name] <= MOST_BYTES]
    missing = [name for name in names if _bytes_here(model, name) != sizes[name]]
    if missing:
        _check_room(model, needed := sum(sizes[name] for name in missing))
        count = f"{len(missing)} file{'s' if len(missing) > 1 else ''}"
        print_message(f"{model.given} is commit {model.commit[:12]}: fetching {what}, {count}, {_bytes(needed)}")

    def fetch(name: str) -> None:
        again = _bytes_here(model, name) is not None  # the cached file has a different size than the hub lists
        options = {"revision": model.commit, "force_download": again}
        _request(model.given, lambda: hub.hf_hub_download(model.name.repository, name, **options))
        if (received := _bytes_here(model, name)) != sizes[name]:
            raise RunFailed(
                f"{model.given}: {name} came with {received or 0:,} bytes, and the hub lists {sizes[name]:,}: run the "
                "same command again"
            )

    try:
        with show_client_log(), concurrent.futures.ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(fetch, missing))
    except _Unreachable as e:
        raise RunFailed(
            f"{model.given}: the transfer broke off ({e}); run the same command again to continue with the files that "
            "are missing"
        ) from e


def _bytes_here(model: _Model, name: str) -> Optional[int]:
    """Returns the bytes of a model's file in the cache; None if the cache does not have the file."""
    path = path_below(model.folder, name)
    return os.path.getsize(path) if os.path.isfile(path) else None


def _check_room(model: _Model, needed: int) -> None:
    folder = model.folder
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise RunFailed(
            f"{model.given}: {_bytes(needed)} are to be fetched, but {folder} has only {_bytes(free)} free: make "
            "room there, or set HF_HOME to a folder on a larger disk"
        )


def _bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size:,} bytes"


# --- uploads ---------------------------------------------------------------------------------------------------------


def check_push(repository: str) -> None:
    """Raises UserError if `repository` is not of the form org/name, or if the user is not logged in to the hub."""
    name, path = hub_name(f"{HUB}{repository}"), f"--push={repository}"
    if name is None or name.revision is not None or "/" not in repository:
        raise UserError(f"{path}: it must be org/name, without a revision: a push goes to its main branch")
    if _library(path).get_token() is None:
        raise UserError(f"{path}: no token is set here: log in by `hf auth login`, or set HF_TOKEN")


def push(folder: str, repository: str, is_private: bool) -> str:
    """Uploads the files of a folder to the hub as one commit; returns a message with the URL and the commit.

    Creates the repository org/name if it does not exist, and deletes the weights of earlier commits.

    is_private: a new repository is private; an existing repository must be private.

    Raises:
      UserError: for the same reasons as `check_push`; this user may not write to the repository; or `is_private` is
        True and the repository is public.
      RunFailed: the transfer was interrupted; the files of the repository are then unchanged.
    """
    check_push(repository)
    path, library = f"{HUB}{repository}", _library(repository)
    api = library.HfApi()
    if not sys.stderr.isatty():  # for downloads, huggingface_hub itself disables the bars
        library.utils.disable_progress_bars()
    # Delete the weights of earlier commits: an earlier model may have more shards.
    stale = ["model*.safetensors", _INDEX]
    options = {"repo_id": repository, "commit_message": "Export of PretrainAX", "delete_patterns": stale}
    try:
        with show_client_log():
            _request(path, lambda: api.create_repo(repository, private=is_private, exist_ok=True))
            if is_private and not _request(path, lambda: api.model_info(repository, timeout=_TIMEOUT)).private:
                raise UserError(
                    f"--push={repository} is public already: make it private on its page, or use another repository"
                )
            commit = _request(path, lambda: api.upload_folder(folder_path=folder, **options))
    except _Unreachable as e:
        raise RunFailed(f"--push={repository}: the transfer broke off ({e}): run the same command again") from e
    return f"pushed to {api.endpoint}/{repository} as commit {commit.oid[:12]}"


# --- requests --------------------------------------------------------------------------------------------------------


def _request(path: str, call: Callable[[], T]) -> T:
    """Returns the result of a request; while the hub is busy, prints a message and repeats the request.

    Raises:
      _Unreachable: the hub cannot be reached, or is busy for more than PATIENCE seconds.
      UserError, RunFailed: the hub rejects the request, or the disk is full.
    """
    until, pause = time.monotonic() + PATIENCE, _FIRST
    while True:
        try:
            return call()
        except Exception as e:  # the errors of the client's libraries have no common base class
            response = _response(e)
            if response is None:
                _raise_other(path, e)
            if response.status_code not in _BUSY:
                raise _refusal(path, e, response) from e
            why = f"it responds with {response.status_code}"
            wait = _retry_after(response) or pause * random.uniform(0.5, 1.0)
            if time.monotonic() + wait > until:
                raise _Unreachable(f"{why}, and asks for a retry in {wait:,.0f} s") from e
            print_message(f"{path}: the hub is busy ({why}): trying again in {wait:,.0f} s")
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST)


def _response(error: BaseException) -> Optional[_Response]:
    """Returns the response of the hub that caused an error; None if no response caused it."""
    cause: Optional[BaseException] = error
    while cause is not None:
        if (response := getattr(cause, "response", None)) is not None:
            return _Response(response.status_code, response.headers)
        cause = cause.__cause__
    return None


def _raise_other(path: str, error: Exception) -> NoReturn:
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    if isinstance(error, HFValidationError):
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    if isinstance(error, OSError) and error.errno in _FULL:
        raise RunFailed(
            f"{path}: {error.strerror} at {error.filename or 'the cache'}: make room, and run the same command again"
        ) from error
    if isinstance(error, PermissionError):
        raise UserError(f"{path}: {error.filename} cannot be written: set HF_HOME to your own folder") from error
    cause = error.__cause__ or error
    is_offline = isinstance(cause, OfflineModeIsEnabled)
    raise _Unreachable("HF_HUB_OFFLINE is set" if is_offline else _plain(f"{type(cause).__name__}: {cause}")) from error


def _refusal(path: str, error: Exception, response: _Response) -> UserError:
    """Returns the UserError for a request for a model that the hub has rejected, so a retry cannot help."""
    name = hub_name(path)
    assert name is not None
    return _refused(path, name, "model", error, response)


def dataset_error(path: str, repository: str, error: Exception) -> Optional[UserError]:
    """Converts an error raised by the `datasets` package to a UserError.

    Returns None if the Hub did not cause the error.

    Args:
      path: start of the message: the config field and its value.
      repository: name of the dataset, "org/name".
      error: the error that the package datasets raised.
    """
    response, text = _response(error), str(error)
    for message, code in _DATASET_ERRORS:
        if response is None and message in text:
            response = _Response(404, {"X-Error-Code": code})
    if response is not None and response.status_code not in _BUSY:
        return _refused(path, HubName(repository, None), "dataset", error, response)
    if response is not None or isinstance(error, ConnectionError):
        return RunFailed(
            f"{path}: the hub does not respond ({_plain(str(error))}), and the cache of datasets does not have it: run "
            "the same command again with a network and without HF_HUB_OFFLINE"
        )
    return None


def _refused(path: str, name: HubName, kind: str, error: Exception, response: _Response) -> UserError:
    from huggingface_hub import constants, get_token

    code = response.headers.get("X-Error-Code")
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name.repository}"
    log_in = "log in by `hf auth login`, or set HF_TOKEN"
    if response.headers.get("X-Error-Message") == "Invalid credentials in Authorization header":
        return UserError(f"{path}: the hub does not accept the token that is set here: {log_in}")
    if code == "GatedRepo":
        hint = f", then {log_in}" if get_token() is None else " with the account whose token is set here"
        return UserError(f"{path} is gated: ask for access at {page}{hint}")
    if code == "RevisionNotFound":
        return UserError(f"{path}: {name.repository} has no such revision: {page}/tree/main lists them")
    if code == "RepoNotFound" or (not code and response.status_code in (401, 404)):
        hint = f"if it is private, {log_in}" if get_token() is None else "or the token set here has no access to it"
        return UserError(f"{path}: {constants.ENDPOINT} has no {kind} {name.repository}: check the name; {hint}")
    if response.status_code == 403:
        why = _plain(getattr(error, "server_message", None) or str(error))
        return UserError(f"{path}: the hub refuses this ({why}): {log_in}, with a token that has this permission")
    return UserError(f"{path}: the hub responds with {response.status_code} ({_plain(str(error))})")


def _retry_after(response: _Response) -> Optional[float]:
    """Returns the seconds that a response asks to wait before the next request; None if it contains no such header."""
    limit = re.search(r"r=0;\s*t=(\d+)", response.headers.get("RateLimit", "").replace(" ", ""))
    after = response.headers.get("Retry-After", "")
    return float(limit[1]) if limit else float(after) if after.isdigit() else None


def _plain(text: str) -> str:
    """Returns a message as one line of at most 300 characters, without query strings of URLs (may have signatures)."""
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", " ".join(text.split()))[:300]


class _ClientLog(logging.Handler):
    """Logging handler that replaces the handlers of huggingface_hub during requests and prints its warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.requests_lock, self.requests = threading.Lock(), 0
        self.before: tuple[list[logging.Handler], bool] = [], True

    def emit(self, record: logging.LogRecord) -> None:
        print_message(_plain(record.getMessage()))

    def count(self, more: int) -> None:
        logger = logging.getLogger("huggingface_hub")
        with self.requests_lock:
            if not self.requests:
                self.before = logger.handlers, logger.propagate
            self.requests += more
            logger.handlers, logger.propagate = ([self], False) if self.requests else self.before


_client_log = _ClientLog()


@contextlib.contextmanager
def show_client_log() -> Iterator[None]:
    """Context manager that prints the warnings of huggingface_hub, such as resumed transfers, with `print_message`."""
    _client_log.count(1)
    try:
        yield
    finally:
        _client_log.count(-1)


def _library(path: str) -> ModuleType:
    """Imports and returns huggingface_hub; raises UserError if it is not installed. Only hub models require it."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as e:
        raise UserError(f"{path}: {e.name or e} is not installed: pip install 'pretrainax[hub]'") from e
    return huggingface_hub
