"""Computes metrics of labels (scikit-learn), tags (seqeval), numbers (SciPy) and extracted answers (as in SQuAD).

Each function imports its library when called. In all functions, `said` contains predictions and `truth` the labels.
"""

import collections
import re
import string
from collections.abc import Sequence

import numpy as np

from pretrainax.files.extras import import_extra

METRICS = "metrics"  # the extra of setup.cfg that installs the libraries
OF_CLASSES = ("accuracy", "f1", "matthews", "accuracy_f1", "macro_f1")
OF_LABELS = ("accuracy", "f1", "f1_micro")
OF_SPANS = ("accuracy", "precision", "recall", "f1", "strict_f1")
OF_ANSWERS = ("exact_match", "answer_f1")
OF_ANSWERS_OR_NONE = (*OF_ANSWERS, "has_answer_exact_match", "has_answer_f1", "no_answer_accuracy")
OF_NUMBERS = ("pearson", "spearman", "pearson_spearman", "squared_error")


def class_metrics(said: np.ndarray, truth: np.ndarray, classes: int) -> dict[str, float]:
    """Computes the accuracy, F1 and Matthews correlation of n predicted classes.

    With two classes, F1 is the F1 of the second class, as in GLUE. With more classes, F1 is the mean over all classes.
    "macro_f1" is the mean over all classes for any number of classes. The mean omits classes that are neither predicted
    nor correct for any record, as in scikit-learn. "accuracy_f1" is the mean of accuracy and F1, the official metric of
    MRPC and QQP in GLUE and of CB in SuperGLUE.

    Args:
      said, truth: [n] indices of the predicted and the correct classes.
      classes: the number of classes.
    """
    sklearn = import_extra("sklearn.metrics", METRICS, "F1")
    by_class = sklearn.f1_score(truth, said, labels=range(classes), average=None, zero_division=0.0)
    found = np.union1d(truth, said)
    macro_f1 = float(np.mean(by_class[found]))
    f1 = float(by_class[1]) if classes == 2 else macro_f1
    accuracy = float((said == truth).mean())
    # With a single class, scikit-learn returns 0 and warns.
    matthews = float(sklearn.matthews_corrcoef(truth, said)) if len(found) > 1 else 0.0
    scores = {"accuracy": accuracy, "f1": f1, "matthews": matthews, "accuracy_f1": (accuracy + f1) / 2}
    return scores | {"macro_f1": macro_f1}


def multi_label_metrics(said: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Computes accuracy, macro F1 ("f1") and micro F1 of the labels of n records, each with any number of labels.

    For the accuracy, a record is correct only if all its labels are correct.

    Args:
      said, truth: bool [n, labels], True for the predicted and the correct labels.
    """
    sklearn = import_extra("sklearn.metrics", METRICS, "F1")
    # scikit-learn interprets a single column as two classes. Class 1 is the label.
    label_indices = [1] if truth.shape[1] == 1 else None
    scores = {
        f"f1_{kind}": float(sklearn.f1_score(truth, said, labels=label_indices, average=kind, zero_division=0.0))
        for kind in ("macro", "micro")
    }
    return {"accuracy": float((said == truth).all(1).mean()), "f1": scores["f1_macro"], "f1_micro": scores["f1_micro"]}


def span_metrics(said: Sequence[Sequence[str]], truth: Sequence[Sequence[str]], scheme: str) -> dict[str, float]:
    """Computes precision, recall and F1 of the spans that tags "B-X", "I-X" and "O" define (X: the type of a span).

    Spans are defined as in conlleval, the script of the CoNLL shared tasks, in which a span may begin with I-X.
    "strict_f1" ignores spans whose first tag violates the scheme.

    Args:
      said, truth: predicted and correct tags, one list per sentence.
      scheme: "iob1" or "iob2".
    """
    seqeval = import_extra("seqeval.metrics.sequence_labeling", METRICS, "F1 of spans")
    schemes = import_extra("seqeval.scheme", METRICS, "F1 of spans")
    precision, recall, f1, _ = seqeval.precision_recall_fscore_support(truth, said, average="micro", zero_division=0)
    strict = seqeval.f1_score(truth, said, mode="strict", scheme=getattr(schemes, scheme.upper()), zero_division=0)
    return {"precision": float(precision), "recall": float(recall), "f1": float(f1), "strict_f1": float(strict)}


def span_sums(said: Sequence[Sequence[str]], truth: Sequence[Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    """Computes the numerator and the denominator of the F1 of `span_metrics` for each sentence, both [sentences].

    F1 = 2 * correct / (predicted + labeled), with the numbers of spans in all sentences.
    """
    seqeval = import_extra("seqeval.metrics.sequence_labeling", METRICS, "F1 of spans")
    predicted, labeled = ([set(seqeval.get_entities(list(tags))) for tags in sentences] for sentences in (said, truth))
    correct = np.array([2.0 * len(a & b) for a, b in zip(predicted, labeled, strict=True)])
    return correct, np.array([float(len(a) + len(b)) for a, b in zip(predicted, labeled, strict=True)])


def regression_metrics(said: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Computes Pearson and Spearman correlation, their mean, and the mean squared error of n numbers.

    The mean of the two correlations is the official metric of STS-B in GLUE. The correlations are 0 if the
    predictions or the labels are constant.
    """
    from scipy.stats import pearsonr, spearmanr

    varies = len(said) > 1 and np.ptp(said) > 0 and np.ptp(truth) > 0
    pearson, spearman = (float(r(said, truth)[0]) if varies else 0.0 for r in (pearsonr, spearmanr))
    error = float(np.square(said - truth).mean())
    return {
        "pearson": pearson,
        "spearman": spearman,
        "pearson_spearman": (pearson + spearman) / 2,
        "squared_error": error,
    }


def answer_metrics(said: Sequence[str], truth: Sequence[Sequence[str]], some_have_none: bool) -> dict[str, float]:
    """Computes SQuAD's metrics, from 0 to 1, for the answers to n questions: exact match, and the mean F1 of words.

    The metric of an answer is the maximum over its reference answers (Rajpurkar et al. 2016, section 6.1). If a
    question has no reference answer, or only reference answers that consist of articles, the correct answer is "", and
    F1 is 0 or 1.

    Args:
      said: the predicted answer to each question; "" means no answer.
      truth: the reference answers of each question.
      some_have_none: whether some questions have no answer. If True, also computes separate metrics for questions with
        and without answers (Rajpurkar et al. 2018).
    """
    references = [[words for text in texts if (words := _normalized_words(text))] or [[]] for texts in truth]
    pairs = list(zip(map(_normalized_words, said), references, strict=True))
    exact = np.array([float(words in options) for words, options in pairs])
    f1 = np.array([max(_f1_of_words(words, reference) for reference in options) for words, options in pairs])
    scores = {"exact_match": float(exact.mean()), "answer_f1": float(f1.mean())}
    if not some_have_none:
        return scores
    has_answer = np.array([len(texts) > 0 for texts in truth])
    mean = lambda x: float(x.mean()) if len(x) else 0.0  # noqa: E731
    return {
        **scores,
        "has_answer_exact_match": mean(exact[has_answer]),
        "has_answer_f1": mean(f1[has_answer]),
        "no_answer_accuracy": mean(exact[~has_answer]),
    }


def _normalized_words(answer: str) -> list[str]:
    """Splits an answer into lower-case words, without punctuation and articles."""
    letters = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", letters).split()


def _f1_of_words(predicted: Sequence[str], truth: Sequence[str]) -> float:
    if not predicted or not truth:
        return float(predicted == truth)
    common = (collections.Counter(predicted) & collections.Counter(truth)).total()
    return 2.0 * common / (len(predicted) + len(truth))
