"""Scores Markov models of DNA, the baseline for a language model of bases.

    python examples/dna/markov.py dna

The model of order k predicts a base from the k bases before it. Its probabilities are counts of the training records,
smoothed with the model of order k - 1:

    p_k(x | c) = (n(c x) + a p_(k-1)(x | c')) / (n(c) + a)

c' is c without its first base. The script selects the order, and one strength a for all orders, on the validation
records.
"""

import json
import os
import sys

import numpy as np

ORDERS, STRENGTHS = range(13), (16, 64, 256, 1024)
CODES = np.full(256, -1, np.int64)
CODES[np.frombuffer(b"ACGT", np.uint8)] = range(4)


def read(path: str) -> list[np.ndarray]:
    """Reads the records of a JSON Lines file as arrays of codes 0 to 3; omits ambiguous bases (N)."""
    with open(path) as file:
        texts = [np.frombuffer(json.loads(line)["text"].encode(), np.uint8) for line in file]
    return [codes[codes >= 0] for codes in (CODES[text] for text in texts)]


def contexts(codes: np.ndarray, order: int) -> np.ndarray:
    """Returns one number for each base after the first `order` bases: its context and the base itself, in base 4."""
    length = len(codes) - order
    return sum((codes[i : i + length] << 2 * (order - i) for i in range(order + 1)), np.zeros(length, np.int64))


def scores(train: list[np.ndarray], held_out: list[list[np.ndarray]]) -> np.ndarray:
    """Computes bits per base, [strength, order, split]; the first k bases of a record use lower orders."""
    bits = np.zeros((len(STRENGTHS), len(ORDERS), len(held_out)))
    firsts = np.zeros((len(STRENGTHS), len(held_out)))  # bits of the first k bases of all records
    tables = [np.full((1, 4), 0.25, np.float32)] * len(STRENGTHS)
    for order in ORDERS:
        counts = np.bincount(np.concatenate([contexts(codes, order) for codes in train]), minlength=4 ** (order + 1))
        counts = counts.astype(np.float32).reshape(-1, 4)
        sums = counts.sum(1, keepdims=True)
        for s, strength in enumerate(STRENGTHS):
            lower = np.tile(tables[s], (len(counts) // len(tables[s]), 1))
            tables[s] = (counts + strength * lower) / (sums + strength)
            for split, records in enumerate(held_out):
                each = [-np.log2(tables[s].reshape(-1)[contexts(codes, order)]) for codes in records]
                total = firsts[s, split] + sum(float(b.sum(dtype=np.float64)) for b in each)
                bits[s, order, split] = total / sum(map(len, records))
                firsts[s, split] += sum(float(b[0]) for b in each)
    return bits


def main(folder: str) -> None:
    """Prints the bits per base of each order; selects the smoothing and the order on the validation records."""
    train, valid, test = (read(os.path.join(folder, f"{split}.jsonl")) for split in ("train", "valid", "test"))
    bits = scores(train, [valid, test])
    strength, best = np.unravel_index(bits[..., 0].argmin(), bits.shape[:2])
    print(f"smoothing {STRENGTHS[strength]} of {STRENGTHS}; bits per base:\norder  valid   test")
    for order in ORDERS:
        valid_bits, test_bits = bits[strength, order]
        print(f"{order:5}  {valid_bits:.4f}  {test_bits:.4f}{'  chosen on valid' if order == best else ''}")


if __name__ == "__main__":
    main(*sys.argv[1:])
