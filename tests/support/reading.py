"""What the tests of sources share: reading one, and writing lines for it."""

import collections
import json


def texts(source, split, skipped=None):
    """All documents of a split, in order."""
    skipped = collections.Counter() if skipped is None else skipped
    return [text for shard in source.shards(split) for text in source.read(shard, skipped)]


def write_lines(path, lines):
    """A file of JSON lines; a str is written as it is."""
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return str(path)
