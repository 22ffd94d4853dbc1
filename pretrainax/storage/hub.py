"""Brings models of the Hugging Face Hub to this machine, and sends exports there: `hf:org/name@revision` is a folder.

The package huggingface_hub asks the hub, resumes what breaks off, and keeps files in its cache, which other programs
share (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN mean what they mean there). Here is decided what is fetched:
safetensors, JSON and tokenizer files of the first level, no pickle and no program, each of the size that the hub lists.
First come the small files, which say what model it is; weights come when `complete` is asked for them.
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
from pretrainax.storage.store import say

PATIENCE = 120.0  # seconds for which a hub that is busy is asked again
_FIRST, _LONGEST = 1.0, 20.0  # seconds between two requests
_ANSWER = 10.0  # seconds that an answer may take
_AT_A_TIME = 8  # files
_BUSY = (408, 429, 500, 502, 503, 504)
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What tells of a model: no name that is hidden, and of folders only those of sentence-transformers' modules.
_SMALL = re.compile(
    r"\w[\w.-]*\.(json|model)|(vocab|merges|words)\.txt|chat_template\.jinja|manifest\.sha256|\d_[A-Za-z]+/config\.json",
    re.ASCII,
)
_SINGLE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PICKLED = re.compile(r"[^/]*\.(bin|pt|pth|ckpt|h5|msgpack|pkl)")

# What datasets says of the hub's answer, which it does not pass on, and the hub's own code.
_SAID_OF_DATA = (("is a gated dataset", "GatedRepo"), ("doesn't exist on the Hub", "RepoNotFound"))

T = TypeVar("T")


@dataclasses.dataclass
class _Model:
    """A model of the hub at one commit."""

    given: str  # "hf:org/name@main"
    name: HubName
    commit: str
    folder: str  # in the cache, where its files come to
    sizes: Optional[Mapping[str, int]]  # bytes of each file that the hub lists; None: the hub was not reached
    has_weights: bool = False  # all of them are in the folder

    @property
    def exact(self) -> str:
        return f"{HUB}{self.name.repository}@{self.commit}"


_models: dict[str, _Model] = {}  # of this process, by what was given: a name stands for one commit as long as it lives
_folders: dict[str, _Model] = {}


class _Answer(NamedTuple):
    """Holds what tells of an answer of the hub."""

    status_code: int
    headers: Mapping[str, str]


class _NoAnswer(Exception):
    """The hub cannot be reached, or is too busy; says why."""


def folder_of(path: str) -> str:
    """Returns the folder where the small files of a model of the hub are: its configs and its tokenizer.

    Without a network, or with HF_HUB_OFFLINE=1, that is the copy of the cache, and said so.

    Raises:
      UserError: no such model or revision, or not for this user; says what to do.
      RunFailed: the hub does not answer and nothing is in the cache; the disk has no room; a transfer broke off.
    """
    if path not in _models:
        if problem := path_problem(path, takes_hub=True):
            raise UserError(f"{path}: {problem}")
        model = _found(path)
        _bring(model, [name for name in model.sizes or () if _SMALL.fullmatch(name)], "its configs and tokenizer")
        _remember(model)
        _models[path] = _folders[model.folder] = model
    return _models[path].folder


def exact_name(path: str) -> str:
    """Returns a path of the hub with the commit that it stands for: hf:org/name@1a2b…, which stays what it is."""
    folder_of(path)
    return _models[path].exact


def complete(folder: str) -> None:
    """Brings the weights, where a folder is that of a model of the hub.

    Raises:
      UserError: there are none that can be read: it has pickles alone.
      RunFailed: as `folder_of`.
    """
    model = _folders.get(os.path.abspath(folder))
    if model is None or model.has_weights:
        return
    names = _weights(model, os.listdir(model.folder) if model.sizes is None else model.sizes)
    missing = [name for name in names if _bytes_here(model, name) is None]
    if missing and model.sizes is None:
        raise RunFailed(
            f"{model.given}: the cache has a part of it, without {', '.join(missing[:3])}, and the hub is not reached: "
            "run the same command again with a network, and without HF_HUB_OFFLINE"
        )
    if model.sizes is not None:
        _bring(model, names, "its weights")
    model.has_weights = True


def _weights(model: _Model, listed: "Mapping[str, int] | list[str]") -> list[str]:
    """Returns the files that hold a model's weights, as `interop.safetensors_files` reads them."""
    index = os.path.join(model.folder, _INDEX)
    found = [name for name in (_SINGLE, _ADAPTER) if name in listed]
    if _SINGLE not in listed and _INDEX in listed and os.path.exists(index):
        shards = read_object(index).get("weight_map")
        found += sorted({str(name) for name in (shards.values() if isinstance(shards, dict) else ())})
    if odd := [name for name in found if not _SHARD.fullmatch(name)]:
        raise UserError(f"{model.given}: {_INDEX} names the file {odd[0]!r}, it must be a safetensors file beside it")
    if found or model.sizes is None:
        return found or [_SINGLE]
    pickled = sorted(name for name in listed if _PICKLED.fullmatch(name))
    there = f"holds {', '.join(pickled[:3])} and no safetensors" if pickled else "holds no safetensors"
    advice = (
        ": files that can run code when they are opened are never fetched. Take a revision that has them, as "
        f"{HUB}{model.name.repository}@refs/pr/1, where the hub's page lists one under Community; or, where you trust "
        f"them, convert them with transformers: {how_to_convert(model.folder, model.name.repository)}"
    )
    raise UserError(f"{model.given} {there}{advice if pickled else ': give a model that does'}")


def how_to_convert(folder: str, source: str) -> str:
    """Returns what makes safetensors of weights that are not read.

    Args:
      folder: where the config.json of the model is.
      source: what transformers calls it.
    """
    config = os.path.join(folder, "config.json")
    known = read_object(config).get("architectures") if os.path.exists(config) else None
    # of a file that may come from anybody, and is to be pasted
    name = known[0] if isinstance(known, list) and known and str(known[0]).isidentifier() else "AutoModel"
    return (
        f'python -c "from transformers import {name} as M; '
        f"M.from_pretrained('{source}').save_pretrained('converted')\", and copy its tokenizer's files there"
    )


# --- finding ---------------------------------------------------------------------------------------------------------


def _found(path: str) -> _Model:
    """Asks the hub what a path names; where it does not answer, the cache."""
    name = hub_name(path)
    assert name is not None
    hub = _library(path)
    wanted = {"revision": name.revision, "timeout": _ANSWER, "files_metadata": True}
    try:
        with heard():
            info = _asked(path, lambda: hub.HfApi().model_info(name.repository, **wanted))
    except _NoAnswer as e:
        return _cached(path, name, str(e))
    if not _COMMIT.fullmatch(info.sha or ""):  # it becomes a part of a path
        raise UserError(f"{path}: {hub.constants.ENDPOINT} is no hub: it names the commit {info.sha!r}")
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
            "command once with a network, or give a folder"
        )
    say(f"{path}: the hub is not reached ({why}); the copy of commit {commit[:12]} in the cache is used")
    return _Model(path, name, commit, folder, None)


def _remember(model: _Model) -> None:
    """Writes into the cache what a name stands for, as its layout has it: where there is no network, that is asked."""
    revision = model.name.revision or "main"
    reference = path_below(os.path.join(os.path.dirname(os.path.dirname(model.folder)), "refs"), revision)
    if model.sizes is not None and revision != model.commit:
        with contextlib.suppress(OSError):  # a cache that may only be read
            os.makedirs(os.path.dirname(reference), exist_ok=True)
            write_atomically(reference, model.commit)


def _snapshot(name: HubName, commit: str) -> str:
    """Returns the folder of the cache where the files of a commit come to."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    of_repository = repo_folder_name(repo_id=name.repository, repo_type="model")
    return os.path.join(
        os.path.realpath(os.path.expanduser(constants.HF_HUB_CACHE)), of_repository, "snapshots", commit
    )


# --- fetching --------------------------------------------------------------------------------------------------------


def _bring(model: _Model, names: list[str], what: str) -> None:
    """Fetches files of a model that are not here yet; says how many bytes that is, when there is room for them."""
    sizes, hub = model.sizes or {}, _library(model.given)
    if unlisted := [name for name in names if name not in sizes]:
        raise UserError(f"{model.given} does not hold {', '.join(unlisted[:3])}, which its {_INDEX} names")
    for name in (name for name in names if not _SHARD.fullmatch(name) and sizes[name] > MOST_BYTES):
        say(f"{model.given}: {name} is left out, of {sizes[name]:,} bytes: more than is read of such a file")
    names = [name for name in names if _SHARD.fullmatch(name) or sizes[name] <= MOST_BYTES]
    lacking = [name for name in names if _bytes_here(model, name) != sizes[name]]
    if lacking:
        _check_room(model, needed := sum(sizes[name] for name in lacking))
        count = f"{len(lacking)} file{'s' if len(lacking) > 1 else ''}"
        say(f"{model.given} is commit {model.commit[:12]}: fetching {what}, {count}, {_bytes(needed)}")

    def fetch(name: str) -> None:
        again = _bytes_here(model, name) is not None  # but others than the hub lists
        which = {"revision": model.commit, "force_download": again}
        _asked(model.given, lambda: hub.hf_hub_download(model.name.repository, name, **which))
        if (came := _bytes_here(model, name)) != sizes[name]:
            raise RunFailed(
                f"{model.given}: {name} came with {came or 0:,} bytes, and the hub lists {sizes[name]:,}: run the same "
                "command again"
            )

    try:
        with heard(), concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
            list(pool.map(fetch, lacking))
    except _NoAnswer as e:
        raise RunFailed(
            f"{model.given}: the transfer broke off ({e}); the files that came are kept, and the same command goes on "
            "from them"
        ) from e


def _bytes_here(model: _Model, name: str) -> Optional[int]:
    """Returns the size of a file in the cache; None where it is not there."""
    path = path_below(model.folder, name)
    return os.path.getsize(path) if os.path.isfile(path) else None


def _check_room(model: _Model, needed: int) -> None:
    folder = model.folder
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise RunFailed(
            f"{model.given}: {_bytes(needed)} are to be fetched, and {folder} has {_bytes(free)} free: make "
            "room there, or set HF_HOME to a folder of a larger disk"
        )


def _bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size:,} bytes"


# --- sending ---------------------------------------------------------------------------------------------------------


def check_push(repository: str) -> None:
    """Raises UserError where nothing can be sent to a repository of this name, or by a user who has not logged in."""
    name, path = hub_name(f"{HUB}{repository}"), f"--push={repository}"
    if name is None or name.revision is not None or "/" not in repository:
        raise UserError(f"{path}: it must be org/name, without a revision: a push goes to its main branch")
    if _library(path).get_token() is None:
        raise UserError(f"{path}: no token is set here: log in by `hf auth login`, or set HF_TOKEN")


def push(folder: str, repository: str, is_private: bool) -> str:
    """Sends the files of a folder as one commit, in the place of weights that are there; returns a line about it.

    is_private: where there is no such repository yet, it becomes a private one.

    Raises:
      UserError: as `check_push`, or this user may not write there, or what is there is public and is not to be.
      RunFailed: the transfer broke off; nothing of the repository has changed then.
    """
    check_push(repository)
    path, library = f"{HUB}{repository}", _library(repository)
    api = library.HfApi()
    if not sys.stderr.isatty():  # of downloads the client sees that itself
        library.utils.disable_progress_bars()
    # a model of fewer files than that before is not to lie among its shards
    other = ["model*.safetensors", _INDEX]
    to = {"repo_id": repository, "commit_message": "Export of PretrainAX", "delete_patterns": other}
    try:
        with heard():
            _asked(path, lambda: api.create_repo(repository, private=is_private, exist_ok=True))
            if is_private and not _asked(path, lambda: api.model_info(repository, timeout=_ANSWER)).private:
                raise UserError(f"--push={repository} is public already: make it private on its page, or take another")
            commit = _asked(path, lambda: api.upload_folder(folder_path=folder, **to))
    except _NoAnswer as e:
        raise RunFailed(f"--push={repository}: the transfer broke off ({e}): run the same command again") from e
    return f"pushed to {api.endpoint}/{repository} as commit {commit.oid[:12]}"


# --- answers ---------------------------------------------------------------------------------------------------------


def _asked(path: str, call: Callable[[], T]) -> T:
    """Returns what a request returns; asks again where the hub is busy, and says so.

    Raises:
      _NoAnswer: it cannot be reached, or is busy for longer than PATIENCE.
      UserError, RunFailed: it refuses, or the disk is full.
    """
    until, pause = time.monotonic() + PATIENCE, _FIRST
    while True:
        try:
            return call()
        except Exception as e:  # the client passes on errors of its libraries, which have no class in common
            response = _response(e)
            if response is None:
                _raise_other(path, e)
            if response.status_code not in _BUSY:
                raise _refusal(path, e, response) from e
            why = f"it answers {response.status_code}"
            wait = _wanted_wait(response) or pause * random.uniform(0.5, 1.0)
            if time.monotonic() + wait > until:
                raise _NoAnswer(f"{why}, and is to be asked again in {wait:,.0f} s") from e
            say(f"{path}: the hub is busy ({why}): asking again in {wait:,.0f} s")
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST)


def _response(error: BaseException) -> Optional[_Answer]:
    """Returns the hub's answer that an error is about; None where there was none."""
    cause: Optional[BaseException] = error
    while cause is not None:
        if (response := getattr(cause, "response", None)) is not None:
            return _Answer(response.status_code, response.headers)
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
        raise UserError(f"{path}: {error.filename} cannot be written: set HF_HOME to a folder of your own") from error
    cause = error.__cause__ or error
    is_wanted = isinstance(cause, OfflineModeIsEnabled)
    raise _NoAnswer("HF_HUB_OFFLINE is set" if is_wanted else _plain(f"{type(cause).__name__}: {cause}")) from error


def _refusal(path: str, error: Exception, response: _Answer) -> UserError:
    """Returns the line about an answer that stays the same however often it is asked for."""
    name = hub_name(path)
    assert name is not None
    return _refused(path, name, "model", error, response)


def data_set_error(path: str, repository: str, error: Exception) -> Optional[UserError]:
    """Returns the line about a data set that the hub does not give; None where an error has other reasons.

    Args:
      path: what the line begins with: the field, and its value.
      repository: "org/name".
      error: as the package datasets raises it.
    """
    response, text = _response(error), str(error)
    for said, code in _SAID_OF_DATA:
        if response is None and said in text:
            response = _Answer(404, {"X-Error-Code": code})
    if response is not None and response.status_code not in _BUSY:
        return _refused(path, HubName(repository, None), "data set", error, response)
    if response is not None or isinstance(error, ConnectionError):
        return RunFailed(
            f"{path}: the hub does not answer ({_plain(str(error))}), and the cache of datasets does not have it: run "
            "the same command again with a network, and without HF_HUB_OFFLINE"
        )
    return None


def _refused(path: str, name: HubName, what: str, error: Exception, response: _Answer) -> UserError:
    from huggingface_hub import constants, get_token

    code = response.headers.get("X-Error-Code")
    page = f"{constants.ENDPOINT}/{'datasets/' if what == 'data set' else ''}{name.repository}"
    log_in = "log in by `hf auth login`, or set HF_TOKEN"
    if response.headers.get("X-Error-Message") == "Invalid credentials in Authorization header":
        return UserError(f"{path}: the hub does not know the token that is set here: {log_in}")
    if code == "GatedRepo":
        then = f", then {log_in}" if get_token() is None else " with the account whose token is set here"
        return UserError(f"{path} is gated: ask for access at {page}{then}")
    if code == "RevisionNotFound":
        return UserError(f"{path}: {name.repository} has no such revision: {page}/tree/main lists them")
    if code == "RepoNotFound" or (not code and response.status_code in (401, 404)):
        then = f"if it is private, {log_in}" if get_token() is None else "or the token that is set here may not see it"
        return UserError(f"{path}: {constants.ENDPOINT} has no {what} {name.repository}: mind the name; {then}")
    if response.status_code == 403:
        why = _plain(getattr(error, "server_message", None) or str(error))
        return UserError(f"{path}: the hub refuses this ({why}): {log_in}, with a token that may do it")
    return UserError(f"{path}: the hub answers {response.status_code} ({_plain(str(error))})")


def _wanted_wait(response: _Answer) -> Optional[float]:
    """Returns for how many seconds a hub that limits its requests wants none; None where it does not say."""
    limit = re.search(r"r=0;\s*t=(\d+)", response.headers.get("RateLimit", "").replace(" ", ""))
    after = response.headers.get("Retry-After", "")
    return float(limit[1]) if limit else float(after) if after.isdigit() else None


def _plain(text: str) -> str:
    """Returns a message for one line, without the queries of URLs, which may be signed."""
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", " ".join(text.split()))[:300]


class _Said(logging.Handler):
    """Shows what the client logs while anybody asks it, and hands it to nobody else."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lock_of_asking, self.asking = threading.Lock(), 0
        self.before: tuple[list[logging.Handler], bool] = [], True

    def emit(self, record: logging.LogRecord) -> None:
        say(_plain(record.getMessage()))

    def count(self, more: int) -> None:
        logger = logging.getLogger("huggingface_hub")
        with self.lock_of_asking:
            if not self.asking:
                self.before = logger.handlers, logger.propagate
            self.asking += more
            logger.handlers, logger.propagate = ([self], False) if self.asking else self.before


_said = _Said()


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Shows what the client logs meanwhile, a transfer that is resumed, as every line about a store is shown."""
    _said.count(1)
    try:
        yield
    finally:
        _said.count(-1)


def _library(path: str) -> ModuleType:
    """Imports the client: a run that names no model of the hub needs none of it."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as e:
        raise UserError(f"{path}: {e.name or e} is not installed: pip install 'pretrainax[hub]'") from e
    return huggingface_hub
