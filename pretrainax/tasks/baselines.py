"""Trivial baselines of tasks: the most frequent label, word frequencies, and other predictors without a Transformer.

A baseline predicts the validation records after it has seen the training records. Its outputs have the format of a task
head's outputs, so that the same functions compute the metrics of baselines and models.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from pretrainax.config import UserError
from pretrainax.data.sources.base import Note
from pretrainax.files.extras import import_extra
from pretrainax.tasks.chunks import WINDOW, record_indices
from pretrainax.tasks.label_metrics import METRICS

if TYPE_CHECKING:
    from pretrainax.tasks.base import Task

_MAX_WORDS = 50_000  # maximum number of words and pairs of words in a bag of words; the most frequent win
# Inverse regularization of the linear models on TF-IDF features. Not tuned per task; with words and pairs of words, 10
# gives an accuracy of 0.80 on SST-2 (6,920 records) and a Matthews correlation of 0.18 on CoLA.
_INVERSE_REGULARIZATION = 10.0


Outputs: TypeAlias = Any  # the first argument of `Task.metrics`: NumPy arrays, or a list of generated strings
Predicted: TypeAlias = tuple[dict[str, float], Outputs, list[Note]]  # the result of `Validation.predict`


class Baseline(NamedTuple):
    """The outputs of a baseline for all validation records."""

    name: str
    outputs: Outputs
    is_constant: bool = False  # the baseline does not read the text of a record
    has_loss: bool = True  # the outputs are logits, from which `Task.document_losses` computes a meaningful loss


def per_document(values: np.ndarray, notes: Sequence[Note]) -> np.ndarray:
    """Repeats the outputs of the records, [records, …], for each document (window) of a record, [documents, …]."""
    if not notes or WINDOW not in notes[0]:
        return values
    return values[record_indices(notes)]


def prior_logits(labels: np.ndarray, is_multi_label: bool) -> np.ndarray:
    """Computes the logits [L] of the label frequencies; one extra count is split evenly among the labels.

    Args:
      labels: 0 or 1 for each label of the training records, [records, L].
      is_multi_label: whether a record has any number of labels. If True, the extra count is half a positive record.
    """
    outcomes = 2 if is_multi_label else labels.shape[1]
    share = (labels.sum(0) + 1 / outcomes) / (len(labels) + 1)
    return np.log(share) - np.log1p(-share) if is_multi_label else np.log(share)


class BagOfWords:
    """TF-IDF features of the words and pairs of words in a record's text or text pair.

    For a text pair, there are the features of each text, their products (words in both), and the cosine similarity.
    """

    def __init__(self, texts: Sequence[Sequence[str]]):
        """Learns the vocabulary from the training records; raises UserError if they have no word."""
        sklearn = import_extra("sklearn.feature_extraction.text", METRICS, "the bag-of-words baseline")
        self._vectorizer = sklearn.TfidfVectorizer(
            ngram_range=(1, 2), sublinear_tf=True, max_features=_MAX_WORDS, token_pattern=r"(?u)\b\w+\b"
        )
        try:
            self._vectorizer.fit([text for row in texts for text in row])
        except ValueError as e:
            raise UserError("the training records have no word for a bag of words") from e

    def features(self, texts: Sequence[Sequence[str]]):
        """Returns the sparse matrix of features, [records, F]."""
        from scipy import sparse

        columns = [self._vectorizer.transform(column) for column in zip(*texts, strict=True)]
        if len(columns) == 2:
            product = columns[0].multiply(columns[1])
            columns += [product, sparse.csr_matrix(product.sum(1))]
        return sparse.csr_matrix(sparse.hstack(columns))


def bag_of_words_classifier(
    train: Sequence[Sequence[str]], labels: np.ndarray, valid: Sequence[Sequence[str]], is_multi_label: bool
) -> np.ndarray:
    """Trains a logistic regression per label on a bag of words; returns logits for `valid`, [records, L].

    Args:
      train, valid: the text or text pair of each record.
      labels: 0 or 1 for each label of the training records, [records, L].
      is_multi_label: whether a record has any number of labels.

    Raises:
      ValueError: all training records have the same label.
    """
    words = BagOfWords(train)
    linear_model = import_extra("sklearn.linear_model", METRICS, "a baseline")
    multiclass = import_extra("sklearn.multiclass", METRICS, "a baseline")
    model = linear_model.LogisticRegression(C=_INVERSE_REGULARIZATION, solver="liblinear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a label that no or every training record has gets a constant prediction
        classifier = multiclass.OneVsRestClassifier(model).fit(
            words.features(train), labels if is_multi_label else labels.argmax(1)
        )
        predicted = classifier.predict_proba(words.features(valid))
    probabilities = np.zeros((len(valid), labels.shape[1]))
    if is_multi_label:
        probabilities[:] = predicted[:, -labels.shape[1] :]  # scikit-learn adds a first column to a single label
    else:
        probabilities[:, classifier.classes_] = predicted
    probabilities = probabilities.clip(1e-6, 1 - 1e-6)
    return np.log(probabilities) - np.log1p(-probabilities) if is_multi_label else np.log(probabilities)


def bag_of_words_regression(
    train: Sequence[Sequence[str]], numbers: np.ndarray, valid: Sequence[Sequence[str]]
) -> np.ndarray:
    """Trains a ridge regression on a bag of words; returns the predicted numbers for `valid`, [records]."""
    words = BagOfWords(train)
    linear_model = import_extra("sklearn.linear_model", METRICS, "a baseline")
    model = linear_model.Ridge(alpha=1 / _INVERSE_REGULARIZATION, solver="lsqr").fit(words.features(train), numbers)
    return model.predict(words.features(valid))


def _has_nan(outputs: Outputs) -> bool:
    arrays = outputs.values() if isinstance(outputs, Mapping) else [outputs]
    return any(np.isnan(array).any() for array in arrays if isinstance(array, np.ndarray))


def metrics_or_nan(task: "Task", outputs: Outputs, notes: Sequence[Note]) -> dict[str, float]:
    """Computes the metrics of a task. All are NaN if an output is NaN, whose argmax would give plausible metrics."""
    if _has_nan(outputs):
        return dict.fromkeys(task.metric_names, math.nan)
    return task.metrics(outputs, notes)


def sums_of_parts(
    metrics: Callable[[np.ndarray, Sequence[Note]], dict[str, float]],
    answers: np.ndarray,
    notes: Sequence[Note],
    records: Sequence[slice],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Computes metrics that are means over records for each record alone; the result is as in `Task.record_sums`.

    Args:
      metrics: computes the metrics of some records.
      answers, notes: head outputs and notes of all documents, as in `Task.metrics`.
      records: the documents of each record.
    """
    parts = [metrics(answers[documents], notes[documents]) for documents in records]
    return {name: (np.array([part[name] for part in parts]), np.ones(len(parts))) for name in parts[0]}


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Computes the cross-entropy in nats of each row of logits [n, L] for the label indices [n]."""
    logits = logits.astype(np.float64)
    highest = logits.max(-1, keepdims=True)
    log_partition = highest[:, 0] + np.log(np.exp(logits - highest).sum(-1))
    return log_partition - np.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
