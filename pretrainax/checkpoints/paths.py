"""Converts local paths for Orbax and TensorStore, which misinterpret some paths."""

import glob
import os
import re
from collections.abc import Iterator

from etils.epath.gpath import PosixGPath

from pretrainax.config import UserError

# folder: names that TensorStore rejects. bucket: prefixes of local paths that Orbax interprets as buckets.
_INVALID = re.compile(r"(?P<folder>[^/]*\\[^/]*|[^/]*\.__lock)(/|$)|^/(?P<bucket>gs|s3|az|hf)/")


class ExactPath(PosixGPath):
    """A path whose characters are never treated as wildcards.

    Orbax calls `glob`, which would treat the brackets in a folder name (`run[lr=0.1]`) as a wildcard.
    """

    def glob(self, pattern: str) -> Iterator["ExactPath"]:
        """Yields the paths below this path that match `pattern`, which is relative to this path."""
        return map(type(self), glob.glob(os.path.join(glob.escape(os.fspath(self)), pattern)))


def exact_path(path: str) -> ExactPath:
    """Makes a path absolute for Orbax and TensorStore; raises UserError if they would misinterpret it."""
    path = os.path.abspath(path)
    if match := _INVALID.search(path):
        why = f"the folder {match['folder']!r}" if match["folder"] else f"the prefix /{match['bucket']}/"
        raise UserError(
            f"no checkpoint can be saved in {path}, because of {why}: use another path, or a link to this one"
        )
    return ExactPath(path)
