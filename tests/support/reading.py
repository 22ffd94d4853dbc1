"""Shared code of the tests of data sources: reads a source, and writes files for it."""

import collections
import json


def texts(source, split, skipped=None):
    """Returns all documents of a split, in order."""
    skipped = collections.Counter() if skipped is None else skipped
    return [text for shard in source.shards(split) for text in source.read(shard, skipped)]


def write_lines(path, lines):
    """Writes a file of JSON lines; strings are written unchanged."""
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)
