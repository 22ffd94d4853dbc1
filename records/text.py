"""Builds the text of the records from a public collection of books, and checks its SHA-256.

    python records/text.py text

The books come from https://github.com/mlschmitt/classic-books-markdown at one commit. All are in the public domain. The
command downloads the archive of the repository (100 MB); `--archive=FILE` reads a downloaded file instead. The rules:

1. A book is AUTHOR/TITLE.md. Its text starts after the line of dashes that ends its header. The text omits the two
   longest books, so that no book is more than 5 % of the training text.
2. A document is a sequence of whole paragraphs of at least 8,000 characters; the last document of a book may be
   shorter.
3. The SHA-256 of the author's name decides whether all books of the author are training text or held out. An author
   with several books, or a book in two editions, is therefore never in both.
4. Training text: books in the order of the SHA-256 of their path, until 64 MB.
5. Held-out text: documents of the other authors in the order of their SHA-256. The first 160 are for the score
   (heldout.jsonl), and the next 80 are for the validation during a run (valid.jsonl).
"""

import argparse
import hashlib
import json
import os
import pathlib
import re
import sys
import tarfile
import urllib.request
from collections.abc import Iterator

from rules import TEXT

from pretrainax.files.atomic_files import write_atomically

COMMIT = "944882722e9a96fa6cf2739dc2ea757e101f412f"
URL = f"https://codeload.github.com/mlschmitt/classic-books-markdown/tar.gz/{COMMIT}"
TRAIN_BYTES = 64_000_000
SCORED, VALIDATED = 160, 80  # documents
LEFT_OUT = ("Samuel Richardson/Clarissa.md", "Various/King James Bible.md")
HELD_OUT = 25  # one in 25 authors is held out
DOCUMENT = 8_000  # characters


def books(archive: str) -> dict[str, str]:
    """Reads the text of each book of the collection, by its path AUTHOR/TITLE.md."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isfile() and path not in LEFT_OUT and re.fullmatch(r"[^/]+/[^/]+\.md", path):
                text = tar.extractfile(member).read().decode().replace("\r\n", "\n")
                found[path] = re.split(r"^-{5,}\n", text, maxsplit=1, flags=re.MULTILINE)[-1].strip()
    return found


def documents(text: str) -> Iterator[str]:
    """Cuts a book between paragraphs into documents of at least `DOCUMENT` characters."""
    paragraphs, size = [], 0
    for paragraph in re.split(r"\n\s*\n", text):
        paragraphs.append(paragraph.strip())
        size += len(paragraph)
        if size >= DOCUMENT:
            yield "\n\n".join(paragraphs)
            paragraphs, size = [], 0
    if size:
        yield "\n\n".join(paragraphs)


def splits(found: dict[str, str]) -> dict[str, list[str]]:
    """Assigns the documents of all books to the three files, by file name."""
    held_out = {path: int(_digest(path.split("/")[0]), 16) % HELD_OUT == 0 for path in found}
    train, size = [], 0
    for path in sorted((path for path in found if not held_out[path]), key=_digest):
        if size >= TRAIN_BYTES:
            break
        train += documents(found[path])
        size += len(found[path].encode())
    others = sorted({d for path in found if held_out[path] for d in documents(found[path])}, key=_digest)
    return {
        "train.jsonl": train,
        "heldout.jsonl": others[:SCORED],
        "valid.jsonl": others[SCORED : SCORED + VALIDATED],
    }


def write(archive: str, folder: str) -> None:
    """Writes the three files, one JSON record {"text": …} per document."""
    os.makedirs(folder, exist_ok=True)
    for name, texts in splits(books(archive)).items():
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        write_atomically(os.path.join(folder, name), "".join(lines))


def problems(folder: str) -> Iterator[str]:
    """Yields one line for each file of the text that is missing or has the wrong SHA-256."""
    for name, expected in TEXT.items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            yield f"{path} is missing: run python records/text.py {folder}"
        elif (actual := sha256(path)) != expected:
            yield f"{path} has the SHA-256 {actual}, it must be {expected}"


def sha256(path: str) -> str:
    """Computes the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="folder of the three files")
    parser.add_argument("--archive", help="downloaded archive of the collection; without it, the command downloads it")
    given = parser.parse_args()
    archive = given.archive or os.path.join(given.folder, "books.tar.gz")
    if not os.path.exists(archive):
        os.makedirs(given.folder, exist_ok=True)
        urllib.request.urlretrieve(URL, f"{archive}.part")
        os.replace(f"{archive}.part", archive)
    write(archive, given.folder)
    found = list(problems(given.folder))
    print("\n".join(found) or f"{pathlib.Path(given.folder)} has the text of the records", file=sys.stderr)
    return 1 if found else 0


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
