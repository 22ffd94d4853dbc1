"""Computes metrics of generated text, with the packages rouge-score and sacreBLEU."""

from collections.abc import Iterable, Sequence

import numpy as np

from pretrainax.files.extras import import_extra
from pretrainax.tasks.label_metrics import METRICS

_ROUGE = ("rouge1", "rouge2", "rougeL")
SCORES = {"exact_match": ("exact_match",), "rouge": _ROUGE, "bleu": ("bleu",), "chrf": ("chrf",)}  # -> metrics
PACKAGES = {"rouge": "rouge_score", "bleu": "sacrebleu", "chrf": "sacrebleu"}  # score -> package that it needs


def names(scores: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the metrics that belong to `scores`, which are keys of SCORES; ignores unknown scores."""
    return tuple(name for score in scores for name in SCORES.get(score, ()))


def generation_metrics(said: Sequence[str], truth: Sequence[str], scores: Iterable[str]) -> dict[str, float]:
    """Computes the metrics of n generated texts, compared with n reference texts.

    exact_match  fraction of generated texts that equal the reference, without surrounding white space
    rouge        mean F1 of words, pairs of words and the longest common subsequence, after stemming (Lin 2004)
    bleu, chrf   BLEU and chrF of the whole split, from 0 to 100, by sacreBLEU (Post 2018; Popović 2015)

    Args:
      said: the generated texts.
      truth: the reference texts.
      scores: keys of SCORES.
    """
    metrics = {}
    for score in scores:
        metrics |= {"exact_match": _exact_match, "rouge": _rouge, "bleu": _bleu, "chrf": _chrf}[score](said, truth)
    return metrics


def label_accuracy(said: Sequence[str], truth: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Computes the fraction of generated texts that equal the correct label, and counts texts that are no label.

    Surrounding white space is ignored: labels may begin with a space, which is a part of their token in many decoders.
    """
    said, truth, labels = ([text.strip() for text in texts] for texts in (said, truth, labels))
    accuracy = np.mean([a == b for a, b in zip(said, truth, strict=True)])
    return {"label_accuracy": float(accuracy), "no_label": float(sum(text not in labels for text in said))}


def _exact_match(predicted: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
    return {"exact_match": float(np.mean([a.strip() == b.strip() for a, b in zip(predicted, truth, strict=True)]))}


def _rouge(predicted: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
    rouge_scorer = import_extra("rouge_score.rouge_scorer", METRICS, "rouge")
    scorer = rouge_scorer.RougeScorer(list(_ROUGE), use_stemmer=True)
    scores = [scorer.score(b, a) for a, b in zip(predicted, truth, strict=True)]
    return {name: float(np.mean([score[name].fmeasure for score in scores])) for name in _ROUGE}


def _bleu(predicted: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
    sacrebleu = import_extra("sacrebleu.metrics", METRICS, "bleu")
    return {"bleu": sacrebleu.BLEU().corpus_score(list(predicted), [list(truth)]).score}


def _chrf(predicted: Sequence[str], truth: Sequence[str]) -> dict[str, float]:
    sacrebleu = import_extra("sacrebleu.metrics", METRICS, "chrf")
    return {"chrf": sacrebleu.CHRF().corpus_score(list(predicted), [list(truth)]).score}
