"""Downloads models from the Hugging Face Hub (`hf:org/name@revision`) to a local folder, and uploads exports.

The package huggingface_hub sends the requests, resumes interrupted transfers, and stores files in its cache, which
other programs share. Its environment variables HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN apply. This module
selects the files: top-level safetensors, JSON and tokenizer files, but no pickle files and no code. Each file must have
the size that the hub lists. `folder_of` downloads the small files (the configs and the tokenizer), and
`download_weights` downloads the weights.
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
from pretrainax.files.extras import import_extra
from pretrainax.files.json_files import read_object
from pretrainax.files.object_names import path_below
from pretrainax.files.paths import HUB, HubName, hub_name, path_problem
from pretrainax.files.regular_files import MAX_BYTES
from pretrainax.storage.store import print_message

PATIENCE = 120.0  # seconds for which a request is retried while the hub is busy
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 20.0  # seconds between two requests: initial and maximum
_TIMEOUT = 10.0  # seconds to wait for a response
_PARALLEL_DOWNLOADS = 8  # number of files that are downloaded at the same time
_BUSY_STATUS_CODES = (408, 429, 500, 502, 503, 504)
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# Configs, tokenizers and chat templates: no hidden files, and no other folders than those of the last line.
_SMALL_FILE = re.compile(
    r"\w[\w.-]*\.(json|model)|(vocab|merges|words)\.txt|chat_template\.jinja|manifest\.sha256"
    r"|\d_[A-Za-z]+/config\.json|additional_chat_templates/\w[\w.-]*\.jinja",  # modules of sentence-transformers
    re.ASCII,
)
_SINGLE_FILE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
# The files of an earlier push, which would change the model of a later one: more shards, an adapter, a chat template.
_EXPORTED = f"""model*.safetensors {_INDEX} {_ADAPTER} adapter_config.json config.json generation_config.json curves.png
    tokenizer.json tokenizer_config.json special_tokens_map.json tokenizer.model spiece.model vocabulary.json
    characters.json chat_template.jinja additional_chat_templates/*.jinja modules.json [0-9]_*/config.json
    sentence_bert_config.json config_sentence_transformers.json manifest.sha256""".split()
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PICKLE_FILE = re.compile(r"[^/]*\.(bin|pt|pth|ckpt|h5|msgpack|pkl)")

# Error messages of the `datasets` package, which drops the hub's response -> error code of the hub.
_DATASET_ERRORS = (("is a gated dataset", "GatedRepo"), ("doesn't exist on the Hub", "RepoNotFound"))

T = TypeVar("T")


@dataclasses.dataclass
class _Model:
    """A model on the hub at a specific commit."""

    path: str  # the path from the user: "hf:org/name@main"
    name: HubName
    commit: str
    folder: str  # cache folder of this commit's files
    sizes: Optional[Mapping[str, int]]  # size in bytes of each file on the hub; None: the hub did not respond
    has_weights: bool = False  # True if the folder contains all weights

    @property
    def pinned_path(self) -> str:
        return f"{HUB}{self.name.repository}@{self.commit}"


_models: dict[str, _Model] = {}  # by `path`; a path refers to the same commit until the process exits
_folders: dict[str, _Model] = {}  # by `folder`


class _Response(NamedTuple):
    """The status code and headers of a response from the hub."""

    status_code: int
    headers: Mapping[str, str]


class _Unreachable(Exception):
    """Raised if the hub cannot be reached or is busy for too long; the message contains the reason."""


def folder_of(path: str) -> str:
    """Downloads a hub model's configs and tokenizer; returns the model's cache folder.

    If the hub is unreachable, or with HF_HUB_OFFLINE=1, returns the folder of a cached copy and prints its commit.

    Raises:
      UserError: the model or revision does not exist, or the user has no access to it; the message suggests a remedy.
      RunFailed: the hub does not respond and the cache has no copy, the disk is full, or a transfer was interrupted.
    """
    if path not in _models:
        if problem := path_problem(path, takes_hub=True):
            raise UserError(f"{path}: {problem}")
        model = _resolve(path)
        _download(model, [n for n in model.sizes or () if _SMALL_FILE.fullmatch(n)], "its configs and tokenizer")
        _record_commit(model)
        _models[path] = _folders[model.folder] = model
    return _models[path].folder


def pinned_name(path: str) -> str:
    """Pins a hub path to the current commit (hf:org/name@1a2b…), so that its files never change."""
    folder_of(path)
    return _models[path].pinned_path


def download_weights(folder: str) -> None:
    """Downloads a hub model's weights to its cache folder `folder`; does nothing for any other folder.

    Raises:
      UserError: the model has no safetensors files, for example only pickle files.
      RunFailed: for the same reasons as `folder_of`.
    """
    model = _folders.get(os.path.abspath(folder))
    if model is None or model.has_weights:
        return
    names = _weight_files(model, os.listdir(model.folder) if model.sizes is None else model.sizes)
    missing = [name for name in names if _cached_bytes(model, name) is None]
    if missing and model.sizes is None:
        raise RunFailed(
            f"{model.path}: the cache has a part of it, without {', '.join(missing[:3])}, and the hub is not reached: "
            "run the same command again with a network and without HF_HUB_OFFLINE"
        )
    if model.sizes is not None:
        _download(model, names, "its weights")
    model.has_weights = True


def _weight_files(model: _Model, file_names: "Mapping[str, int] | list[str]") -> list[str]:
    """Returns the names of a model's safetensors weight files; raises UserError if there are none."""
    index = os.path.join(model.folder, _INDEX)
    files = [name for name in (_SINGLE_FILE, _ADAPTER) if name in file_names]
    if _SINGLE_FILE not in file_names and _INDEX in file_names and os.path.exists(index):
        shards = read_object(index).get("weight_map")
        files += sorted({str(name) for name in (shards.values() if isinstance(shards, dict) else ())})
    if invalid := [name for name in files if not _SHARD.fullmatch(name)]:
        raise UserError(
            f"{model.path}: {_INDEX} names the file {invalid[0]!r}; it must be a safetensors file in the same folder"
        )
    if files or model.sizes is None:
        return files or [_SINGLE_FILE]
    pickled = sorted(name for name in file_names if _PICKLE_FILE.fullmatch(name))
    content = f"holds {', '.join(pickled[:3])} and no safetensors" if pickled else "holds no safetensors"
    advice = (
        ": such files can run code when they are opened, so they are never fetched. Use a revision with safetensors, "
        f"for example {HUB}{model.name.repository}@refs/pr/1 if the hub's page lists one under Community; or, if you "
        f"trust the files, convert them with transformers: {conversion_command(model.folder, model.name.repository)}"
    )
    raise UserError(f"{model.path} {content}{advice if pickled else ': use a model with safetensors'}")


def conversion_command(folder: str, source: str) -> str:
    """Returns a shell command that converts pickled weights to safetensors with transformers.

    Args:
      folder: folder that contains the model's config.json.
      source: the model's name or path, as transformers expects it.
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


def _resolve(path: str) -> _Model:
    """Resolves a hub path to the model's current commit, or to the cached commit if the hub does not respond."""
    name = hub_name(path)
    assert name is not None
    hub = _library(path)
    query = {"revision": name.revision, "timeout": _TIMEOUT, "files_metadata": True}
    try:
        with show_client_log():
            info = _request(path, lambda: hub.HfApi().model_info(name.repository, **query))
    except _Unreachable as e:
        return _find_cached(path, name, str(e))
    if not _COMMIT.fullmatch(info.sha or ""):  # the commit becomes part of a path
        raise UserError(f"{path}: {hub.constants.ENDPOINT} is not a hub: its commit is {info.sha!r}")
    sizes = {file.rfilename: file.size for file in info.siblings or () if file.size is not None}
    return _Model(path, name, info.sha, _snapshot(name, info.sha), sizes)


def _find_cached(path: str, name: HubName, reason: str) -> _Model:
    hub = _library(path)
    try:
        commit = hub.HfApi().resolve_revision(name.repository, revision=name.revision, local_files_only=True).resolved
    except hub.errors.RevisionResolutionError:
        commit = ""
    if not commit or not os.path.isdir(folder := _snapshot(name, commit)):
        raise RunFailed(
            f"{path}: the hub cannot be reached ({reason}), and the cache of this machine does not have it: run the "
            "same command once with a network, or set a folder"
        )
    print_message(f"{path}: the hub is not reached ({reason}); using the copy of commit {commit[:12]} in the cache")
    return _Model(path, name, commit, folder, None)


def _record_commit(model: _Model) -> None:
    """Records the commit of the model's revision in huggingface_hub's cache, for later use without a network."""
    revision = model.name.revision or "main"
    reference = path_below(os.path.join(os.path.dirname(os.path.dirname(model.folder)), "refs"), revision)
    if model.sizes is not None and revision != model.commit:
        with contextlib.suppress(OSError):  # the cache is read-only
            os.makedirs(os.path.dirname(reference), exist_ok=True)
            write_atomically(reference, model.commit)


def _snapshot(name: HubName, commit: str) -> str:
    """Returns the path of the cache folder for a model at a given commit, which may not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    repository_folder = repo_folder_name(repo_id=name.repository, repo_type="model")
    return os.path.join(
        os.path.realpath(os.path.expanduser(constants.HF_HUB_CACHE)), repository_folder, "snapshots", commit
    )


# --- downloads -------------------------------------------------------------------------------------------------------


def _download(model: _Model, names: list[str], label: str) -> None:
    """Downloads those of a model's files `names` that the cache lacks, and prints their total size.

    Files larger than MAX_BYTES are skipped with a message, unless they contain weights. Raises UserError if the hub
    does not list a file, and RunFailed if there is not enough disk space or a transfer fails.

    label: description of the files for the message, such as "its weights".
    """
    sizes, hub = model.sizes or {}, _library(model.path)
    if unlisted_names := [name for name in names if name not in sizes]:
        raise UserError(f"{model.path} does not hold {', '.join(unlisted_names[:3])}, but its {_INDEX} names them")
    for name in (name for name in names if not _SHARD.fullmatch(name) and sizes[name] > MAX_BYTES):
        print_message(f"{model.path}: {name} is skipped: it has {sizes[name]:,} bytes, the limit is {MAX_BYTES:,}")
    names = [name for name in names if _SHARD.fullmatch(name) or sizes[name] <= MAX_BYTES]
    missing_names = [name for name in names if _cached_bytes(model, name) != sizes[name]]
    if missing_names:
        _check_free_space(model, needed := sum(sizes[name] for name in missing_names))
        count = f"{len(missing_names)} file{'s' if len(missing_names) > 1 else ''}"
        print_message(f"{model.path} is commit {model.commit[:12]}: fetching {label}, {count}, {_size_text(needed)}")

    def fetch(name: str) -> None:
        has_wrong_size = _cached_bytes(model, name) is not None  # the cached file has a wrong size
        options = {"revision": model.commit, "force_download": has_wrong_size}
        _request(model.path, lambda: hub.hf_hub_download(model.name.repository, name, **options))
        if (received := _cached_bytes(model, name)) != sizes[name]:
            raise RunFailed(
                f"{model.path}: {name} came with {received or 0:,} bytes, and the hub lists {sizes[name]:,}: run the "
                "same command again"
            )

    try:
        with show_client_log(), concurrent.futures.ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
            list(pool.map(fetch, missing_names))
    except _Unreachable as e:
        raise RunFailed(
            f"{model.path}: the transfer broke off ({e}); run the same command again to continue with the files that "
            "are missing"
        ) from e


def _cached_bytes(model: _Model, name: str) -> Optional[int]:
    """Returns the size in bytes of a model's cached file, or None if the file is not in the cache."""
    path = path_below(model.folder, name)
    return os.path.getsize(path) if os.path.isfile(path) else None


def _check_free_space(model: _Model, needed: int) -> None:
    folder = model.folder
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise RunFailed(
            f"{model.path}: {_size_text(needed)} are to be fetched, but {folder} has only {_size_text(free)} free: "
            "make room there, or set HF_HOME to a folder on a larger disk"
        )


def _size_text(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size:,} bytes"


# --- uploads ---------------------------------------------------------------------------------------------------------


def check_push(repository: str) -> None:
    """Raises UserError if `repository` is not of the form org/name or the user is not logged in to the hub."""
    name, path = hub_name(f"{HUB}{repository}"), f"--push={repository}"
    if name is None or name.revision is not None or "/" not in repository:
        raise UserError(f"{path}: it must be org/name, without a revision: a push goes to its main branch")
    if _library(path).get_token() is None:
        raise UserError(f"{path}: no token is set here: log in by `hf auth login`, or set HF_TOKEN")


def push(folder: str, repository: str, is_private: bool) -> str:
    """Uploads a folder's files to the hub as one commit; returns a message with the URL and the commit.

    Creates the repository org/name if it does not exist. The commit also deletes the other files of earlier exports.

    is_private: whether to create the repository as private. If True, an existing repository must be private.

    Raises:
      UserError: for the same reasons as `check_push`, because the user may not write to the repository, or because
        `is_private` is True but the repository is public.
      RunFailed: the transfer was interrupted, which leaves the repository's files unchanged.
    """
    check_push(repository)
    path, library = f"{HUB}{repository}", _library(repository)
    api = library.HfApi()
    if not sys.stderr.isatty():  # for downloads, huggingface_hub itself disables the progress bars
        library.utils.disable_progress_bars()
    options = {"repo_id": repository, "commit_message": "Export of PretrainAX", "delete_patterns": _EXPORTED}
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
    """Returns the result of a request, retrying it (and printing a message) as long as the hub is busy.

    Raises:
      _Unreachable: the hub cannot be reached, or is busy for more than PATIENCE seconds.
      UserError, RunFailed: the hub rejects the request, or the disk is full.
    """
    deadline, pause = time.monotonic() + PATIENCE, _FIRST_PAUSE
    while True:
        try:
            return call()
        except Exception as e:  # the errors of the client's libraries have no common base class
            response = _response(e)
            if response is None:
                _raise_without_response(path, e)
            if response.status_code not in _BUSY_STATUS_CODES:
                raise _model_rejection(path, e, response) from e
            reason = f"it responds with {response.status_code}"
            wait_seconds = _retry_after(response) or pause * random.uniform(0.5, 1.0)
            if time.monotonic() + wait_seconds > deadline:
                raise _Unreachable(f"{reason}, and asks for a retry in {wait_seconds:,.0f} s") from e
            print_message(f"{path}: the hub is busy ({reason}): trying again in {wait_seconds:,.0f} s")
            time.sleep(wait_seconds)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _response(error: BaseException) -> Optional[_Response]:
    """Returns the hub response that caused an error, or None if the error has another cause."""
    cause: Optional[BaseException] = error
    while cause is not None:
        if (response := getattr(cause, "response", None)) is not None:
            return _Response(response.status_code, response.headers)
        cause = cause.__cause__
    return None


def _raise_without_response(path: str, error: Exception) -> NoReturn:
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    if isinstance(error, HFValidationError):
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRORS:
        raise RunFailed(
            f"{path}: {error.strerror} at {error.filename or 'the cache'}: make room, and run the same command again"
        ) from error
    if isinstance(error, PermissionError):
        raise UserError(f"{path}: {error.filename} cannot be written: set HF_HOME to your own folder") from error
    cause = error.__cause__ or error
    is_offline = isinstance(cause, OfflineModeIsEnabled)
    raise _Unreachable("HF_HUB_OFFLINE is set" if is_offline else _clean(f"{type(cause).__name__}: {cause}")) from error


def _model_rejection(path: str, error: Exception, response: _Response) -> UserError:
    """Builds the UserError for a request about the hub model `path` that the hub rejected."""
    name = hub_name(path)
    assert name is not None
    return _rejection(path, name, "model", error, response)


def dataset_error(path: str, repository: str, error: Exception) -> Optional[UserError]:
    """Converts an error raised by the `datasets` package to a UserError.

    Returns None if the Hub did not cause the error.

    Args:
      path: the config field and its value, which begin the message.
      repository: name of the dataset, "org/name".
      error: the error that the `datasets` package raised.
    """
    response, error_message = _response(error), str(error)
    for pattern, code in _DATASET_ERRORS:
        if response is None and pattern in error_message:
            response = _Response(404, {"X-Error-Code": code})
    if response is not None and response.status_code not in _BUSY_STATUS_CODES:
        return _rejection(path, HubName(repository, None), "dataset", error, response)
    if response is not None or isinstance(error, ConnectionError):
        return RunFailed(
            f"{path}: the hub does not respond ({_clean(str(error))}), and the cache of datasets does not have it: run "
            "the same command again with a network and without HF_HUB_OFFLINE"
        )
    return None


def _rejection(path: str, name: HubName, kind: str, error: Exception, response: _Response) -> UserError:
    from huggingface_hub import constants, get_token

    code = response.headers.get("X-Error-Code")
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name.repository}"
    login = "log in by `hf auth login`, or set HF_TOKEN"
    if response.headers.get("X-Error-Message") == "Invalid credentials in Authorization header":
        return UserError(f"{path}: the hub does not accept the token that is set here: {login}")
    if code == "GatedRepo":
        hint = f", then {login}" if get_token() is None else " with the account whose token is set here"
        return UserError(f"{path} is gated: ask for access at {page}{hint}")
    if code == "RevisionNotFound":
        return UserError(f"{path}: {name.repository} has no such revision: {page}/tree/main lists them")
    if code == "RepoNotFound" or (not code and response.status_code in (401, 404)):
        hint = f"if it is private, {login}" if get_token() is None else "or the token set here has no access to it"
        return UserError(f"{path}: {constants.ENDPOINT} has no {kind} {name.repository}: check the name; {hint}")
    if response.status_code == 403:
        reason = _clean(getattr(error, "server_message", None) or str(error))
        return UserError(f"{path}: the hub refuses this ({reason}): {login}, with a token that has this permission")
    return UserError(f"{path}: the hub responds with {response.status_code} ({_clean(str(error))})")


def _retry_after(response: _Response) -> Optional[float]:
    """Returns the seconds to wait before the next request, according to the response headers, or None if not given."""
    rate_limit = re.search(r"r=0;\s*t=(\d+)", response.headers.get("RateLimit", "").replace(" ", ""))
    retry_after = response.headers.get("Retry-After", "")
    return float(rate_limit[1]) if rate_limit else float(retry_after) if retry_after.isdigit() else None


def _clean(text: str) -> str:
    """Shortens a message to one line of at most 300 characters, without URL queries, which may contain signatures."""
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", " ".join(text.split()))[:300]


class _ClientLog(logging.Handler):
    """Logging handler that replaces huggingface_hub's handlers during requests, and prints warnings as messages."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.requests_lock, self.requests = threading.Lock(), 0
        self.saved_handlers: tuple[list[logging.Handler], bool] = [], True

    def emit(self, record: logging.LogRecord) -> None:
        print_message(_clean(record.getMessage()))

    def change_requests(self, change: int) -> None:
        logger = logging.getLogger("huggingface_hub")
        with self.requests_lock:
            if not self.requests:
                self.saved_handlers = logger.handlers, logger.propagate
            self.requests += change
            logger.handlers, logger.propagate = ([self], False) if self.requests else self.saved_handlers


_client_log = _ClientLog()


@contextlib.contextmanager
def show_client_log() -> Iterator[None]:
    """Prints huggingface_hub's warnings, such as about resumed transfers, with `print_message` inside the context."""
    _client_log.change_requests(1)
    try:
        yield
    finally:
        _client_log.change_requests(-1)


def _library(path: str) -> ModuleType:
    """Imports huggingface_hub, which only hub models require; raises UserError if it is not installed."""
    import_extra("huggingface_hub.errors", "hub", path)
    return import_extra("huggingface_hub", "hub", path)
