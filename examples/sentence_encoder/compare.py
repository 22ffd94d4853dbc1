"""Ranks the passages of held-out pairs with each encoder, with TF-IDF, and with the export in sentence-transformers.

python examples/sentence_encoder/compare.py pairs/test.jsonl runs/encoder runs/sentences exported
"""

import json
import sys

import numpy as np
from sentence_transformers import SentenceTransformer
from sklearn.feature_extraction.text import TfidfVectorizer

import pretrainax

AT = 10  # recall@AT


def report(name: str, queries: np.ndarray, passages: np.ndarray) -> None:
    """Prints recall@10 and the mean reciprocal rank, with standard errors over queries, by cosine similarity."""
    queries, passages = (x / np.linalg.norm(x, axis=1, keepdims=True).clip(1e-9) for x in (queries, passages))
    scores = queries @ passages.T
    ranks = (scores >= np.diag(scores)[:, None]).sum(1)  # equal scores share the worst rank
    values = {f"recall@{AT}": ranks <= AT, "mrr": 1 / ranks}
    errors = {metric: value.std(ddof=1) / len(ranks) ** 0.5 for metric, value in values.items()}
    print(f"{name:28}" + "  ".join(f"{m} {v.mean():.3f} ± {errors[m]:.3f}" for m, v in values.items()), flush=True)


def main(pairs: str, encoder: str, sentences: str, exported: str) -> None:
    """Prints a row for each model, and the largest difference between our vectors and the export's vectors."""
    with open(pairs) as file:
        records = [json.loads(line) for line in file]
    queries, passages = ([record[field] for record in records] for field in ("query", "passage"))
    chance = sum(1 / rank for rank in range(1, len(records) + 1)) / len(records)
    print(f"{len(records)} queries and passages; chance: recall@{AT} {AT / len(records):.3f}, mrr {chance:.3f}")
    tfidf = TfidfVectorizer(sublinear_tf=True).fit(passages)
    report("TF-IDF", *(tfidf.transform(texts).toarray() for texts in (queries, passages)))
    for name, run in (("encoder before", encoder), ("sentence encoder", sentences)):
        model = pretrainax.load(run)
        ours = [model.embed(texts, truncate=True) for texts in (queries, passages)]
        report(name, *ours)
    theirs = [SentenceTransformer(exported, device="cpu").encode(texts) for texts in (queries, passages)]
    report("the same, exported", *theirs)
    print(f"largest difference of a vector: {max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)):.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
