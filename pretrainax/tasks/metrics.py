"""The metrics of tasks."""

from pretrainax.config.metric import Metric, declare

declare(
    Metric(
        "f1",
        "harmonic mean of precision and recall: of spans, of the second of two classes, or the mean of all",
        larger_is_better=True,
    ),
    Metric("precision", "spans said that are there, of all said", larger_is_better=True),
    Metric("recall", "spans said that are there, of all there", larger_is_better=True),
    Metric(
        "strict_f1",
        "F1 of spans, of which none counts that begins otherwise than its scheme says",
        larger_is_better=True,
    ),
    Metric(
        "unread", "words that are cut off at the end of their row: no tag is right of them, and they are of no span"
    ),
    Metric(
        "exact_match",
        "answers that are right: of those found, but for case, punctuation, articles and spaces; "
        "of those written, but for white space around them",
        larger_is_better=True,
    ),
    Metric(
        "answer_f1", "F1 of the words of an answer and of the best of the right ones: the mean", larger_is_better=True
    ),
    Metric(
        "question_accuracy",
        "questions of whose answers each is judged rightly: MultiRC's exact match",
        larger_is_better=True,
    ),
    Metric("has_answer_exact_match", "exact_match of questions that have an answer", larger_is_better=True),
    Metric("has_answer_f1", "answer_f1 of questions that have an answer", larger_is_better=True),
    Metric("no_answer_accuracy", "questions without an answer to which none is said", larger_is_better=True),
    Metric("f1_micro", "the same of all labels together", larger_is_better=True),
    Metric("matthews", "Matthews' correlation of classes said and true: 0 by chance, 1 at best", larger_is_better=True),
    Metric(
        "accuracy_f1", "mean of accuracy and F1, as GLUE ranks MRPC and QQP, and SuperGLUE CB", larger_is_better=True
    ),
    Metric("pearson", "correlation of numbers said and true", larger_is_better=True),
    Metric("spearman", "correlation of their ranks", larger_is_better=True),
    Metric("pearson_spearman", "mean of both, as GLUE ranks STS-B", larger_is_better=True),
    Metric("squared_error", "mean square of the difference of numbers said and true"),
    Metric("rouge1", "mean F1 of the words of answers written and true, of their stems", larger_is_better=True),
    Metric("rouge2", "the same of pairs of words", larger_is_better=True),
    Metric("rougeL", "the same of their longest common subsequence", larger_is_better=True),
    Metric("bleu", "BLEU of all answers written, from 0 to 100, as sacreBLEU counts it", larger_is_better=True),
    Metric("chrf", "chrF of all answers written, from 0 to 100, as sacreBLEU counts it", larger_is_better=True),
    Metric("recall@1", "queries whose passage has the best score of all passages of the split", larger_is_better=True),
    Metric("recall@10", "queries whose passage is among the ten best", larger_is_better=True),
    Metric("recall@100", "queries whose passage is among the hundred best", larger_is_better=True),
    Metric("mrr", "mean reciprocal rank: of one over the place of a query's passage among all", larger_is_better=True),
    Metric("label_accuracy", "answers written that are the word of the true label", larger_is_better=True),
    Metric("no_label", "answers written that are the word of no label"),
)
