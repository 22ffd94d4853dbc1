"""The figures of tasks with labels, tags or numbers, by scikit-learn, seqeval and SciPy, imported where needed; and of
answers, as SQuAD defines them."""

import collections
import re
import string
from collections.abc import Sequence

import numpy as np

OF_CLASSES = ("accuracy", "f1", "matthews", "accuracy_f1")
OF_LABELS = ("accuracy", "f1", "f1_micro")
OF_SPANS = ("accuracy", "precision", "recall", "f1", "strict_f1")
OF_ANSWERS = ("exact_match", "answer_f1")
OF_ANSWERS_OR_NONE = (*OF_ANSWERS, "has_answer_exact_match", "has_answer_f1", "no_answer_accuracy")
OF_NUMBERS = ("pearson", "spearman", "pearson_spearman", "squared_error")


def of_classes(said: np.ndarray, truth: np.ndarray, classes: int) -> dict[str, float]:
    """Returns accuracy, F1 and Matthews' correlation of answers [n] with one class each.

    F1 is of the second of two classes, as in GLUE, else the mean of that of each. GLUE ranks MRPC and QQP by the mean
    of accuracy and F1, "accuracy_f1", and SuperGLUE CB.
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    average = "binary" if classes == 2 else "macro"
    f1 = float(f1_score(truth, said, labels=range(classes), average=average, zero_division=0.0))
    accuracy = float((said == truth).mean())
    matthews = float(matthews_corrcoef(truth, said))
    return {"accuracy": accuracy, "f1": f1, "matthews": matthews, "accuracy_f1": (accuracy + f1) / 2}


def of_labels(said: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Returns figures of answers [n, labels] of any number of labels each: how many are right as a whole, the mean F1
    of the labels, and F1 over all of them together."""
    from sklearn.metrics import f1_score

    # One label alone is to scikit-learn a question with two classes, of which the F1 of the first is asked here.
    columns = [1] if truth.shape[1] == 1 else None
    scores = {
        f"f1_{kind}": float(f1_score(truth, said, labels=columns, average=kind, zero_division=0.0))
        for kind in ("macro", "micro")
    }
    return {"accuracy": float((said == truth).all(1).mean()), "f1": scores["f1_macro"], "f1_micro": scores["f1_micro"]}


def of_spans(said: Sequence[Sequence[str]], truth: Sequence[Sequence[str]], scheme: str) -> dict[str, float]:
    """Returns precision, recall and F1 of the spans of a type that tags "B-X", "I-X", "O" tell, one list a sentence.

    Spans are read as the script conlleval of the shared tasks of CoNLL does, to which one may begin with I-X; for
    "strict_f1" it may not where the scheme, "iob1" or "iob2", does not let it.
    """
    from seqeval import scheme as schemes
    from seqeval.metrics import f1_score
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    precision, recall, f1, _ = precision_recall_fscore_support(truth, said, average="micro", zero_division=0)
    strict = f1_score(truth, said, mode="strict", scheme=getattr(schemes, scheme.upper()), zero_division=0)
    return {"precision": float(precision), "recall": float(recall), "f1": float(f1), "strict_f1": float(strict)}


def of_numbers(said: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Returns Pearson's and Spearman's correlation, their mean, by which GLUE ranks, and the mean squared error; [n].

    There is no correlation with what is the same everywhere: 0.
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


def of_answers(said: Sequence[str], truth: Sequence[Sequence[str]], some_have_none: bool) -> dict[str, float]:
    """Returns SQuAD's figures of answers to n questions, from 0 to 1: how many are exactly right, and the mean F1 of
    their words, each against the best of its reference answers (Rajpurkar et al. 2016, section 6.1).

    Where some questions have none, `truth` is empty and "" is right: these and the others have figures of their own too
    (Rajpurkar et al. 2018). F1 is then 0 or 1, as it is of answers of articles alone.
    """
    references = [[words for one in several if (words := _words(one))] or [[]] for several in truth]
    pairs = list(zip(map(_words, said), references, strict=True))
    exact = np.array([float(words in several) for words, several in pairs])
    f1 = np.array([max(_f1_of_words(words, one) for one in several) for words, several in pairs])
    found = {"exact_match": float(exact.mean()), "answer_f1": float(f1.mean())}
    if not some_have_none:
        return found
    has_answer = np.array([len(several) > 0 for several in truth])
    mean = lambda x: float(x.mean()) if len(x) else 0.0  # noqa: E731
    return {
        **found,
        "has_answer_exact_match": mean(exact[has_answer]),
        "has_answer_f1": mean(f1[has_answer]),
        "no_answer_accuracy": mean(exact[~has_answer]),
    }


def _words(answer: str) -> list[str]:
    """Returns the words of an answer in small letters, without punctuation and articles."""
    letters = "".join(c for c in answer.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", letters).split()


def _f1_of_words(said: Sequence[str], truth: Sequence[str]) -> float:
    if not said or not truth:
        return float(said == truth)
    both = (collections.Counter(said) & collections.Counter(truth)).total()
    return 2.0 * both / (len(said) + len(truth))
