"""Validates the paths in flags and config fields, before a command reads or creates files at these paths."""

import os
import re
from typing import NamedTuple, Optional

from absl import flags

from pretrainax.files.object_names import name_problem

_SCHEME = re.compile(r"([A-Za-z][\w+.-]*):/(?=/)")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)")
_CREDENTIALS = re.compile(r":.*@")
# URL scheme of a supported object store -> pip extra that installs its client: pretrainax[gcs].
STORES = {"gs": "gcs", "s3": "s3", "az": "azure", "abfs": "azure", "memory": "test"}
# The names of trained models that commands accept. pretrainax.interop.origin resolves them.
MODEL_NAMES = (
    "A run, RUN@2000, RUN@best, RUN@average5, RUN@ema, RUN@trained, a Hugging Face directory, or hf:org/name[@revision]"
)
HUB = "hf:"  # prefix of paths that name a model on the Hugging Face Hub
_HUB_NAME = re.compile(rf"{HUB}([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@([\w.-]+(?:/[\w.-]+)*))?", re.ASCII)


class HubName(NamedTuple):
    """The parsed name of a model on the Hugging Face Hub: hf:org/name or hf:org/name@revision."""

    repository: str  # org/name, or name alone
    revision: Optional[str]  # branch, tag or commit; None: the main branch


def is_hub(path: str) -> bool:
    """Returns True if a path names a model on the Hugging Face Hub (hf:org/name); "./hf:a" is a local path."""
    return path.startswith(HUB)


def hub_name(path: str) -> Optional[HubName]:
    """Parses hf:org/name or hf:org/name@revision; returns None if the name or the revision is invalid."""
    match = _HUB_NAME.fullmatch(path)
    return HubName(match[1], match[2]) if match and ".." not in path else None


def is_url(path: str) -> bool:
    """Returns True if a path is the URL of a supported object store, for example gs://bucket/runs/a."""
    return bool((match := _URL.match(path)) and match[1] in STORES)


def path_problem(path: str, takes_hub: bool = False) -> str:
    """Checks the syntax of a path; returns a description of the problem, or "" if the path is valid.

    The path need not exist.

    Args:
      takes_hub: whether names of models on the Hugging Face Hub (hf:org/name) are valid.
    """
    if is_hub(path):
        if not takes_hub:
            return (
                "only --from, --base, --compare-with, --tokenizer, config.checkpoint.init_from, "
                "config.distill.teacher and config.tokenizer.path accept a model of the hub: set a folder. "
                "python -m pretrainax.huggingface export --push=org/name uploads a model, and the source "
                "HuggingFace(path='org/name') reads a dataset"
            )
        return (
            "" if hub_name(path) else "it is not a valid name of a hub model: write hf:org/name or hf:org/name@revision"
        )
    scheme = _SCHEME.match(path)
    if scheme and not is_url(path):
        return (
            f"{scheme[0]}/ is not a supported store ({', '.join(f'{name}://' for name in STORES)}): set a URL of one "
            "of these, a local folder, or a mounted folder (NFS, gcsfuse, mount-s3)"
        )
    if scheme:
        return _url_problem(path[scheme.end() + 1 :])
    if "\0" in path:
        return "it contains a zero byte, which paths cannot"
    return "" if is_utf8(path) else "it is not UTF-8: rename the file or folder"


def _url_problem(address: str) -> str:
    """Checks an object-store URL; returns a description of the problem, or "" if the URL is valid.

    Args:
      address: the part of the URL after the scheme: bucket/name for gs://bucket/name.
    """
    bucket, name = address.partition("/")[0], address.rstrip("/")
    if not bucket:
        return "it names no bucket"
    if _CREDENTIALS.search(bucket):
        return (
            "it has a key and a secret, which the files of the run would store: leave out the part before @, and set "
            "the environment variables or the configuration file of the store's tools"
        )
    return f"it is not a valid URL of an object or folder: {problem}" if (problem := name_problem(name)) else ""


def is_utf8(text: str) -> bool:
    """Returns True if a string can be encoded as UTF-8.

    Python represents command-line bytes that are not UTF-8 as surrogates, which cannot be encoded.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


flags.disclaim_key_flags()  # absl then lists each flag under the module that calls `define_path`


class _PathParser(flags.ArgumentParser):
    """Parses the value of a path flag: validates the path and expands ~."""

    def __init__(self, takes_hub: bool):
        super().__init__()
        self.takes_hub = takes_hub

    def parse(self, argument: Optional[str]) -> Optional[str]:
        if problem := path_problem(argument or "", self.takes_hub):
            raise ValueError(problem)
        return argument and os.path.expanduser(argument)


def is_path(flag: flags.Flag) -> bool:
    """Returns True if `define_path` defined the flag."""
    return isinstance(flag.parser, _PathParser)


def define_path(
    name: str, default: Optional[str], help: str, takes_hub: bool = False
) -> flags.FlagHolder[Optional[str]]:
    """Defines a flag for a path: like `flags.DEFINE_string`, but validates the path and expands ~.

    Args:
      takes_hub: whether the flag accepts models on the Hugging Face Hub (hf:org/name), which
        `storage.places.local_path` downloads.
    """
    return flags.DEFINE(_PathParser(takes_hub), name, default, help)
