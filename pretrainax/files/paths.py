"""Validates paths in flags and fields before anything is read or created there."""

import os
import re
from typing import NamedTuple, Optional

from absl import flags

from pretrainax.files.object_names import name_problem

_SCHEME = re.compile(r"([A-Za-z][\w+.-]*):/(?=/)")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)")
_CREDENTIALS = re.compile(r":.*@")
STORES = {"gs": "gcs", "s3": "s3", "az": "azure", "abfs": "azure", "memory": "test"}  # scheme -> extra
HUB = "hf:"  # prefix of Hugging Face Hub models
_HUB_NAME = re.compile(rf"{HUB}([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@([\w.-]+(?:/[\w.-]+)*))?", re.ASCII)


class HubName(NamedTuple):
    """Hugging Face Hub model: hf:org/name or hf:org/name@revision."""

    repository: str
    revision: Optional[str]  # branch, tag or commit; None: the main branch


def is_hub(path: str) -> bool:
    """Returns True if a path names a Hugging Face Hub model; ./hf:a is a folder."""
    return path.startswith(HUB)


def hub_name(path: str) -> Optional[HubName]:
    """Parses a hub path; None for an invalid model name."""
    match = _HUB_NAME.fullmatch(path)
    return HubName(match[1], match[2]) if match and ".." not in path else None


def is_url(path: str) -> bool:
    """Returns True if a path is an object-store URL such as gs://bucket/runs/a."""
    return bool((match := _URL.match(path)) and match[1] in STORES)


def path_problem(path: str, takes_hub: bool = False) -> str:
    """Returns why a path is invalid for a file or folder; "" if it is valid.

    takes_hub: accepts names of Hugging Face Hub models too.
    """
    if is_hub(path):
        if not takes_hub:
            return (
                "only --from, config.checkpoint.init_from, config.distill.teacher and config.tokenizer.path accept a "
                "model of the hub: set a folder. python -m pretrainax.huggingface export --push=org/name uploads a "
                "model, and the source HuggingFace(path='org/name') reads a dataset"
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


def _url_problem(rest: str) -> str:
    """Returns why a store URL is invalid after its scheme; "" if it is valid."""
    bucket, name = rest.partition("/")[0], rest.rstrip("/")
    if not bucket:
        return "it names no bucket"
    if _CREDENTIALS.search(bucket):
        return (
            "it has a key and a secret, which the files of the run would store: leave out the part before @, and set "
            "the environment variables or the configuration file of the store's tools"
        )
    return f"it is not a valid URL of an object or folder: {problem}" if (problem := name_problem(name)) else ""


def is_utf8(text: str) -> bool:
    """Returns True if a string is valid UTF-8; Python stores other command-line bytes as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


flags.disclaim_key_flags()  # flags belong to the callers of `define_path`


class _PathParser(flags.ArgumentParser):
    def __init__(self, takes_hub: bool):
        super().__init__()
        self.takes_hub = takes_hub

    def parse(self, argument: Optional[str]) -> Optional[str]:
        if problem := path_problem(argument or "", self.takes_hub):
            raise ValueError(problem)
        return argument and os.path.expanduser(argument)


def is_path(flag: flags.Flag) -> bool:
    """Returns True if `define_path` defined a flag."""
    return isinstance(flag.parser, _PathParser)


def define_path(
    name: str, default: Optional[str], help: str, takes_hub: bool = False
) -> flags.FlagHolder[Optional[str]]:
    """Defines a path flag with ~ expansion; otherwise like `flags.DEFINE_string`.

    takes_hub: accepts names of Hugging Face Hub models too, which `storage.places.local_path` downloads.
    """
    return flags.DEFINE(_PathParser(takes_hub), name, default, help)
