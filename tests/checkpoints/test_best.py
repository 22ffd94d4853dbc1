"""The name of a metric determines whether larger values are better, and therefore the best step."""

import pytest

from pretrainax import distill, tasks, training  # noqa: F401  declares their metrics
from pretrainax.checkpoints.best import best_of, best_step
from pretrainax.config import UserError
from pretrainax.config.metric import METRICS, larger_is_better
from pretrainax.runs import task_evaluation  # noqa: F401  declares its metrics

LARGER = {
    "replaced_precision",
    "replaced_recall",
    *(f"{of}accuracy" for of in ("", "text_", "sequence_", "replaced_", "pair_", "question_", "no_answer_", "label_")),
    *("multi_token_accuracy", "backward_accuracy"),
    *("hidden_spread", "encoder_hidden_spread", "generator_hidden_spread", "prediction_spread"),
    *("accuracy_f1", "answer_f1", "f1", "f1_micro", "macro_f1", "has_answer_f1", "strict_f1", "precision", "recall"),
    *("exact_match", "has_answer_exact_match", "matthews", "pearson", "spearman", "pearson_spearman"),
    # Metrics of tasks during training.
    *("answered", "accuracy_per_byte", "accuracy_unconditional", "majority_accuracy"),
    *("bleu", "chrf", "rouge1", "rouge2", "rougeL", "mrr", "recall@1", "recall@10", "recall@100"),
}


def test_of_all_figures_that_are_explained_shares_of_right_answers_are_the_better_the_larger():
    assert {name for name in METRICS if larger_is_better(name)} == LARGER
    with pytest.raises(UserError, match="the metric 'my_bleu' is not declared"):
        larger_is_better("my_bleu")
    assert larger_is_better("accuracy/source=loss") and not larger_is_better("loss/source=accuracy")


@pytest.mark.parametrize(
    "figure, values, best",
    [
        ("loss", {1: 3.0, 2: 2.0, 3: 2.0}, 2),
        ("accuracy", {1: 0.3, 2: 0.5, 3: 0.5}, 2),
        ("accuracy/source=web", {1: None, 2: 0.1, 3: 0.5}, 3),
        ("loss", {1: None, 2: None}, None),
        ("loss", {}, None),
    ],
)
def test_the_best_step_is_the_first_of_the_best_that_are_known(figure, values, best):
    assert best_step(values, figure) == best


@pytest.mark.parametrize(
    "validations, best",
    [
        ([(0.5, 1), (3.0, 20), (2.0, 20), (2.5, 20)], 2),
        ([(0.5, 1), (None, 20)], 0),
        ([(0.5, None), (3.0, 20)], 0),  # an older version saved the first one
    ],
)
def test_the_best_is_of_the_validations_of_as_many_batches_as_the_newest(validations, best):
    runs = {
        step: {"metrics": {"loss": loss}, "extra": {"valid_batches": batches}}
        for step, (loss, batches) in enumerate(validations)
    }
    assert best_of(runs, "loss") == best
