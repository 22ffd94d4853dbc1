"""Makes pairs of neighbouring sentences from books: a sentence and the two sentences that follow it.

python examples/sentence_encoder/prepare.py books pairs
"""

import glob
import gzip
import json
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Iterator

PAIRS = {"train": 20_000, "valid": 500, "test": 1_000}  # the maximum number of pairs of each split
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
SPACING = 300  # minimum number of characters between the queries of two pairs of a document
LONGEST = 160  # characters of a sentence; longer sentences would be truncated to the rows of the model


def pairs(text: str) -> Iterator[dict]:
    """Yields the pairs of a document; a query has at least 40 characters."""
    position = 0
    sentences = SENTENCE.split(" ".join(text.split()))
    for query, first, second in zip(sentences, sentences[1:], sentences[2:], strict=False):
        position += len(query)
        if position > SPACING and 40 <= len(query) <= LONGEST and 20 <= len(first) <= LONGEST >= len(second):
            yield {"query": query, "passage": f"{first} {second}"}
            position = 0


def documents(books: str, split: str) -> Iterator[str]:
    """Yields the texts of a split: of BOOKS/{split}*.jsonl.gz, and of the books BOOKS/*/*.md that a hash selects."""
    for name in sorted(glob.glob(os.path.join(books, f"{split}*.jsonl.gz"))):
        with gzip.open(name, "rt") as file:
            yield from (json.loads(line)["text"] for line in file)
    for book in sorted(pathlib.Path(books).glob("*/*.md")):
        percent = zlib.crc32(book.name.encode()) % 100
        if split == ("valid" if percent < 5 else "test" if percent < 15 else "train"):
            yield book.read_text()


def main(books: str, folder: str) -> None:
    """Writes FOLDER/{train,valid,test}.jsonl from the books in the folder BOOKS; no book is in two splits."""
    os.makedirs(folder, exist_ok=True)
    for split, most in PAIRS.items():
        found = [pair for text in documents(books, split) for pair in pairs(text)]
        if not found:
            sys.exit(f"no pairs for {split} in {books}: it must contain {split}*.jsonl.gz, or books */*.md")
        count = min(len(found), most)
        rows = [found[i * len(found) // count] for i in range(count)]  # evenly over all documents
        with open(os.path.join(folder, f"{split}.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{split}: {count} pairs of {len(found)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
