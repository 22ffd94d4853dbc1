"""The figures of texts that a model writes, beside those that it should: by rouge-score and sacreBLEU."""

from collections.abc import Iterable, Sequence

import numpy as np

_ROUGE = ("rouge1", "rouge2", "rougeL")
SCORES = {"exact_match": ("exact_match",), "rouge": _ROUGE, "bleu": ("bleu",), "chrf": ("chrf",)}  # -> its figures


def names(scores: Iterable[str]) -> tuple[str, ...]:
    """Names the figures of some of the scores."""
    return tuple(name for score in scores for name in SCORES.get(score, ()))


def of_texts(said: Sequence[str], truth: Sequence[str], scores: Iterable[str]) -> dict[str, float]:
    """Returns the figures of answers [n] beside the true ones.

    exact_match  how many are the true one, but for white space around them
    rouge        the mean F1 of words, pairs of words and the longest common subsequence, of stems (Lin 2004)
    bleu, chrf   of the whole split, from 0 to 100, as sacreBLEU counts them (Post 2018; Popović 2015)
    """
    found = {}
    for score in scores:
        found |= {"exact_match": _exact_match, "rouge": _rouge, "bleu": _bleu, "chrf": _chrf}[score](said, truth)
    return found


def of_labels(said: Sequence[str], truth: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Returns how many answers are the true label, and the number of those that are no label at all."""
    said = [text.strip() for text in said]
    right = np.mean([a == b for a, b in zip(said, truth, strict=True)])
    return {"label_accuracy": float(right), "no_label": float(sum(text not in labels for text in said))}


def _exact_match(said: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
    return {"exact_match": float(np.mean([a.strip() == b.strip() for a, b in zip(said, truth, strict=True)]))}


def _rouge(said: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(_ROUGE), use_stemmer=True)
    found = [scorer.score(b, a) for a, b in zip(said, truth, strict=True)]
    return {name: float(np.mean([each[name].fmeasure for each in found])) for name in _ROUGE}


def _bleu(said: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
    from sacrebleu.metrics import BLEU

    return {"bleu": BLEU().corpus_score(list(said), [list(truth)]).score}


def _chrf(said: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
    from sacrebleu.metrics import CHRF

    return {"chrf": CHRF().corpus_score(list(said), [list(truth)]).score}
