"""Makes pairs of neighbouring sentences from books: a sentence and the two sentences that follow it.

python examples/sentence_encoder/prepare.py books pairs
"""

import glob
import gzip
import json
import os
import re
import sys
from collections.abc import Iterator

PAIRS = {"train": 20_000, "valid": 500, "test": 1_000}  # the most pairs of each split
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
SPACING = 300  # characters between the queries of two pairs of a document, at least
LONGEST = 160  # characters of a sentence; longer ones would be truncated to the rows of the model


def pairs(text: str) -> Iterator[dict]:
    """Yields the pairs of a document; a query has at least 40 characters."""
    position = 0
    sentences = SENTENCE.split(" ".join(text.split()))
    for query, first, second in zip(sentences, sentences[1:], sentences[2:], strict=False):
        position += len(query)
        if position > SPACING and 40 <= len(query) <= LONGEST and 20 <= len(first) <= LONGEST >= len(second):
            yield {"query": query, "passage": f"{first} {second}"}
            position = 0


def main(books: str, folder: str) -> None:
    """Writes FOLDER/{train,valid,test}.jsonl from BOOKS/{train,valid,test}*.jsonl.gz; no book is in two splits."""
    os.makedirs(folder, exist_ok=True)
    for split, most in PAIRS.items():
        found = []
        for name in sorted(glob.glob(os.path.join(books, f"{split}*.jsonl.gz"))):
            with gzip.open(name, "rt") as file:
                found += [pair for line in file for pair in pairs(json.loads(line)["text"])]
        count = min(len(found), most)
        rows = [found[i * len(found) // count] for i in range(count)]  # evenly over all documents
        with open(os.path.join(folder, f"{split}.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{split}: {count} pairs of {len(found)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
