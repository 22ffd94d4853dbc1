"""Reads files of public repositories, from copies on this machine or from GitHub."""

import functools
import os
import subprocess
import urllib.error
import urllib.parse
import urllib.request

from pretrainax.config.quotes import ReleasedFile
from pretrainax.files.errors import UserError

GITHUB = "https://raw.githubusercontent.com"


class Unavailable(UserError):
    """A file that this machine cannot read, although it may exist."""


@functools.cache
def read_released(file: ReleasedFile, copies: str = "", server: str = GITHUB) -> str:
    """Returns the text of a file of a public repository.

    Args:
      copies: folder of copies, in which the file is "owner/name/commit/path", or "owner/name" is a clone of the
        repository, also a bare one; "" to download the file from `server`.

    Raises:
      Unavailable: the folder of copies has neither, or the server does not return the file.
    """
    return _read_copy(file, copies) if copies else _download(file, server)


def _read_copy(file: ReleasedFile, copies: str) -> str:
    folder = os.path.join(copies, *file.repository.split("/"))
    path = os.path.join(folder, file.commit, *file.path.split("/"))
    if os.path.isfile(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read()
    if any(os.path.isdir(os.path.join(folder, name)) for name in (".git", "objects")):
        command = ["git", "-C", folder, "show", f"{file.commit}:{file.path}"]
        result = subprocess.run(command, capture_output=True, check=False)
        if result.returncode == 0:
            return result.stdout.decode(errors="replace")
        raise Unavailable(f"{folder} has no {file}: {result.stderr.decode(errors='replace').strip()}")
    raise Unavailable(f"there is no {path}, and {folder} is not a clone")


def _download(file: ReleasedFile, server: str) -> str:
    url = f"{server}/{file.repository}/{file.commit}/{urllib.parse.quote(file.path)}"
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.read().decode(errors="replace")
    except (OSError, urllib.error.HTTPError) as e:
        raise Unavailable(f"{url} was not downloaded: {e}") from e


def contains(text: str, quote: str) -> bool:
    """Returns True if a text contains a quote; any run of spaces and line breaks equals any other."""
    return " ".join(quote.split()) in " ".join(text.split())
