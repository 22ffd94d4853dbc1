"""Checkpoint paths for Orbax and TensorStore, which misread some paths."""

import glob
import os
import re
from collections.abc import Iterator

from etils.epath.gpath import PosixGPath

from pretrainax.config import UserError

# TensorStore rejects these folder names. Orbax takes these prefixes for buckets.
_INVALID = re.compile(r"(?P<folder>[^/]*\\[^/]*|[^/]*\.__lock)(/|$)|^/(?P<bucket>gs|s3|az|hf)/")


class ExactPath(PosixGPath):
    """A path without wildcards: Orbax calls `glob` on it, which must also work below `run[lr=0.1]`."""

    def glob(self, pattern: str) -> Iterator["ExactPath"]:
        """Yields the matching paths below this path."""
        return map(type(self), glob.glob(os.path.join(glob.escape(os.fspath(self)), pattern)))


def exact_path(path: str) -> ExactPath:
    """Returns an absolute path for Orbax and TensorStore; raises UserError for paths that they misread."""
    path = os.path.abspath(path)
    if match := _INVALID.search(path):
        why = f"the folder {match['folder']!r}" if match["folder"] else f"the prefix /{match['bucket']}/"
        raise UserError(
            f"no checkpoint can be saved in {path}, because of {why}: use another path, or a link to this one"
        )
    return ExactPath(path)
