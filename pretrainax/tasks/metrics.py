"""Declares the metrics of tasks, with descriptions."""

from pretrainax.config.metric import FRACTION, OF_RECORDS, Metric, declare

declare(
    Metric(
        "f1",
        "harmonic mean of precision and recall: of spans, of the second of two classes, or the mean over classes",
        larger_is_better=True,
    ),
    Metric("macro_f1", "mean of the F1 of each class, which counts rare classes as much", larger_is_better=True),
    Metric("precision", "share of predicted spans that are correct", larger_is_better=True, unit=FRACTION),
    Metric("recall", "share of labeled spans that are predicted", larger_is_better=True, unit=FRACTION),
    Metric(
        "strict_f1",
        "F1 of spans, without spans whose beginning violates the tagging scheme",
        larger_is_better=True,
    ),
    Metric(
        "unread",
        "share of words that are truncated at the end of their row; they count as wrong and as outside of spans",
        unit=FRACTION,
    ),
    Metric(
        "exact_match",
        "share of correct answers; extracted answers are compared without case, punctuation, articles and spaces, "
        "generated answers without surrounding white space",
        larger_is_better=True,
        unit=FRACTION,
    ),
    Metric("answer_f1", "mean F1 of the words of an answer, against the best of its references", larger_is_better=True),
    Metric(
        "question_accuracy",
        "share of questions with only correct judgments of their answers: MultiRC's exact match",
        larger_is_better=True,
        unit=FRACTION,
    ),
    Metric(
        "has_answer_exact_match", "exact_match of questions that have an answer", larger_is_better=True, unit=FRACTION
    ),
    Metric("has_answer_f1", "answer_f1 of questions that have an answer", larger_is_better=True),
    Metric(
        "no_answer_accuracy", "share of questions without an answer that get none", larger_is_better=True, unit=FRACTION
    ),
    Metric("f1_micro", "F1 over all labels together", larger_is_better=True),
    Metric(
        "matthews", "Matthews correlation of predicted and true classes: 0 by chance, 1 at best", larger_is_better=True
    ),
    Metric(
        "accuracy_f1", "mean of accuracy and F1, as GLUE ranks MRPC and QQP, and SuperGLUE CB", larger_is_better=True
    ),
    Metric("pearson", "Pearson correlation of predicted and true numbers", larger_is_better=True),
    Metric("spearman", "Spearman rank correlation of predicted and true numbers", larger_is_better=True),
    Metric("pearson_spearman", "mean of pearson and spearman, as GLUE ranks STS-B", larger_is_better=True),
    Metric("squared_error", "mean squared error of predicted numbers"),
    Metric("rouge1", "mean F1 of the stemmed words of generated and true answers", larger_is_better=True),
    Metric("rouge2", "mean F1 of their pairs of words", larger_is_better=True),
    Metric("rougeL", "mean F1 of their longest common subsequence", larger_is_better=True),
    Metric("bleu", "BLEU of all generated answers, from 0 to 100, by sacreBLEU", larger_is_better=True),
    Metric("chrf", "chrF of all generated answers, from 0 to 100, by sacreBLEU", larger_is_better=True),
    Metric(
        "recall@1",
        "share of queries whose passage has the best score in the split",
        larger_is_better=True,
        unit=FRACTION,
    ),
    Metric("recall@10", "share of queries whose passage is among the ten best", larger_is_better=True, unit=FRACTION),
    Metric(
        "recall@100", "share of queries whose passage is among the hundred best", larger_is_better=True, unit=FRACTION
    ),
    Metric("mrr", "mean reciprocal rank of the passage of a query", larger_is_better=True),
    Metric(
        "label_accuracy", "share of generated answers that are the true label", larger_is_better=True, unit=FRACTION
    ),
    Metric("no_label", "number of generated answers that are not a label", is_count=True),
    depends_on=OF_RECORDS,
)
