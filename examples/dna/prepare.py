"""Cuts a genome in FASTA format into training, validation and test records of bases.

python examples/dna/prepare.py ecoli.fna dna
"""

import gzip
import json
import os
import sys
from collections.abc import Iterator

SEGMENT = 8192  # bases of a record
# The regions follow each other on the genome, so that the test region is far from the training region.
REGIONS = {"train": (0.0, 0.94), "valid": (0.94, 0.96), "test": (0.96, 1.0)}
COMPLEMENT = str.maketrans("ACGT", "TGCA")


def read_fasta(path: str) -> str:
    """Reads the bases of all sequences in a FASTA file, plain or compressed by gzip, in upper case."""
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        return "".join(line.strip().upper() for line in file if not line.startswith(">"))


def records(bases: str, strand: str) -> Iterator[dict]:
    """Yields the segments of a sequence; `start` counts bases from the beginning of `bases`."""
    for start in range(0, len(bases), SEGMENT):
        yield {"text": bases[start : start + SEGMENT], "start": start, "strand": strand}


def main(path: str, folder: str) -> None:
    """Writes FOLDER/{train,valid,test}.jsonl; the training split has both strands."""
    genome = read_fasta(path)
    os.makedirs(folder, exist_ok=True)
    for split, (first, last) in REGIONS.items():
        region = genome[int(first * len(genome)) : int(last * len(genome))]
        rows = list(records(region, "+"))
        if split == "train":
            rows += records(region.translate(COMPLEMENT)[::-1], "-")
        with open(os.path.join(folder, f"{split}.jsonl"), "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print(f"{split}: {len(region):,} bases, {len(rows)} records")


if __name__ == "__main__":
    main(*sys.argv[1:])
