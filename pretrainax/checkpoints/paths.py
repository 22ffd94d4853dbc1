"""Paths of checkpoints as the libraries take them that write there: exactly as they are, or not at all."""

import glob
import os
import re
from collections.abc import Iterator

from etils.epath.gpath import PosixGPath

from pretrainax.config import UserError

# TensorStore takes no such name of a folder. Orbax takes such a beginning for a bucket.
_REFUSED = re.compile(r"(?P<folder>[^/]*\\[^/]*|[^/]*\.__lock)(/|$)|^/(?P<bucket>gs|s3|az|hf)/")


class ExactPath(PosixGPath):
    """A path whose own name is no pattern: Orbax looks for its files by `glob`, also below `run[lr=0.1]`."""

    def glob(self, pattern: str) -> Iterator["ExactPath"]:
        """Yields what matches below this path."""
        return map(type(self), glob.glob(os.path.join(glob.escape(os.fspath(self)), pattern)))


def exact_path(path: str) -> ExactPath:
    """Returns an absolute path for Orbax and TensorStore; UserError for one that they would misread."""
    path = os.path.abspath(path)
    if match := _REFUSED.search(path):
        why = f"the folder {match['folder']!r}" if match["folder"] else f"the beginning /{match['bucket']}/"
        raise UserError(f"no checkpoint can be saved in {path}, for {why}: take another path, or make a link to it")
    return ExactPath(path)
