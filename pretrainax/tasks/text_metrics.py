"""Computes metrics of generated text, with the packages rouge-score and sacreBLEU."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from pretrainax.files.extras import import_extra
from pretrainax.tasks.label_metrics import METRICS

_ROUGE = ("rouge1", "rouge2", "rougeL")
SCORES = {"exact_match": ("exact_match",), "rouge": _ROUGE, "bleu": ("bleu",), "chrf": ("chrf",)}  # -> metrics
# score -> (pattern of a text in which the score finds no words, the words that it finds)
_WORDLESS = {
    "rouge": (re.compile(r"[^a-z0-9]*", re.IGNORECASE), "words of a to z and 0 to 9"),
    "bleu": (re.compile(r".*[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff].*", re.DOTALL), "words between spaces"),
}
PACKAGES = {"rouge": "rouge_score", "bleu": "sacrebleu", "chrf": "sacrebleu"}  # score -> package that it needs


def names(scores: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the metrics that belong to `scores`, which are keys of SCORES; ignores unknown scores."""
    return tuple(name for score in scores for name in SCORES.get(score, ()))


def wordless_scores(text: str, scores: Iterable[str]) -> list[str]:
    """Lists the scores that find no words in a text: rouge in other scripts than Latin, bleu in scripts without spaces.

    Args:
      scores: keys of SCORES.
    """
    return [score for score in scores if score in _WORDLESS and _WORDLESS[score][0].fullmatch(text)]


def wordless_warnings(counts: Mapping[str, int], total: int) -> Iterator[str]:
    """Yields a warning for each score that finds no words in most references.

    Args:
      counts: the number of references in which a score finds no words.
      total: the number of references.
    """
    for score, count in counts.items():
        if 2 * count > total:
            yield (
                f"{score.upper()} FINDS NO WORDS in {count:,} of {total:,} answers, because it compares "
                f"{_WORDLESS[score][1]}: set config.objective.scores to ('chrf',)"
            )


def generation_metrics(said: Sequence[str], truth: Sequence[str], scores: Iterable[str]) -> dict[str, float]:
    """Computes the metrics of n generated strings, compared with n references.

    - exact_match: fraction of generated strings that equal the reference, without surrounding white space.
    - rouge: mean F1 of words, pairs of words and the longest common subsequence, after stemming (Lin 2004).
    - bleu, chrf: BLEU and chrF of the whole split, from 0 to 100, by sacreBLEU (Post 2018; Popović 2015).

    Args:
      said: the generated strings.
      truth: the references.
      scores: keys of SCORES.
    """
    metrics = {}
    for score in scores:
        metrics |= {"exact_match": _exact_match, "rouge": _rouge, "bleu": _bleu, "chrf": _chrf}[score](said, truth)
    return metrics


def label_accuracy(said: Sequence[str], truth: Sequence[str], labels: Sequence[str]) -> dict[str, float]:
    """Computes the fraction of generated strings that equal the correct label; counts strings that are not a label.

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
