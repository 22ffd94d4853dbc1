"""Compares the baselines of every task with values of scikit-learn and NumPy from the same records."""

import collections
import inspect

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import f1_score, log_loss

from pretrainax import tasks
from pretrainax.config import UserError
from pretrainax.data.sources import JsonLines
from pretrainax.tasks import (
    AnswerJudgement,
    Classification,
    EntityChoice,
    ExtractiveQA,
    Instructions,
    MultipleChoice,
    Regression,
    Retrieval,
    Task,
    TextGeneration,
    TokenClassification,
)
from pretrainax.tasks.label_metrics import span_metrics, span_sums
from pretrainax.tokenization import WordPiece
from tests.support import tiny

GOOD, BAD = (
    ["a fine film", "a very fine play", "really good and fine", "good film"],
    ["a dull film", "dull and bad play"],
)
RNG = np.random.default_rng(0)
TRAIN_TEXTS = [(text, label) for _ in range(4) for label, texts in ((1, GOOD), (0, BAD)) for text in texts]
VALID_TEXTS = [("fine film", 1), ("dull play", 0), ("bad and dull", 0), ("good", 1), ("fine and good play", 1)]
TOKENIZER = WordPiece(vocab_size=50).build(iter([text for text, _ in TRAIN_TEXTS] * 20))


def adapted(task, variant="bert", length=32):
    experiment = tiny.get_config(variant)
    experiment.data.sequence_length, experiment.objective = length, task
    return task.adapted(experiment).bind(TOKENIZER)


def baselines(task, train, valid):
    """Returns the metrics of each baseline of a task."""
    train, valid = ([read(task, record) for record in records] for records in (train, valid))
    notes = []
    for record in valid:
        for encoded in task.encode(record, TOKENIZER):
            notes.append({**encoded.note, "parts": np.cumsum([len(ids) for ids in encoded.parts]).tolist()})
    found = {}
    for baseline in task.baselines(train, valid, notes):
        found[baseline.name] = task.metrics(baseline.outputs, notes)
        losses = task.document_losses(baseline.outputs, notes) if baseline.has_loss else None
        found[baseline.name] |= {} if losses is None else {"loss": losses.mean()}
        for name, (numerators, denominators) in task.record_sums(baseline.outputs, notes).items():
            assert numerators.sum() / denominators.sum() == pytest.approx(found[baseline.name][name])
    return found


def read(task, record):
    return JsonLines(path="x").reading(task)._task_record(task, task.read(record), collections.Counter())[0]


def of_texts(pairs):
    return [{"text": text, "label": label} for text, label in pairs]


def test_every_task_declares_its_baselines():
    kinds = [kind for kind in vars(tasks).values() if inspect.isclass(kind) and issubclass(kind, Task)]
    assert len(kinds) > 10
    for kind in kinds:
        if kind not in (Task, tasks.TextTask):
            assert kind.baselines is not Task.baselines, kind


def test_label_frequencies_are_the_prior_of_scikit_learn():
    found = baselines(adapted(Classification(labels=("0", "1"))), of_texts(TRAIN_TEXTS), of_texts(VALID_TEXTS))
    truth, labels = [y for _, y in VALID_TEXTS], [y for _, y in TRAIN_TEXTS]
    prior = DummyClassifier(strategy="prior").fit(np.zeros((len(labels), 1)), labels)
    probabilities = prior.predict_proba(np.zeros((len(truth), 1)))
    prior_metrics = found["label frequencies"]
    # One extra count among 24 records changes a probability by at most 1 / 25 of its distance from 1/2.
    assert prior_metrics["loss"] == pytest.approx(log_loss(truth, probabilities), abs=0.02)
    assert prior_metrics["accuracy"] == 0.6 and prior_metrics["matthews"] == 0.0
    assert prior_metrics["macro_f1"] == pytest.approx(
        f1_score(truth, np.ones(len(truth)), average="macro", zero_division=0)
    )


def test_a_bag_of_words_is_the_logistic_regression_of_scikit_learn():
    found = baselines(adapted(Classification(labels=("0", "1"))), of_texts(TRAIN_TEXTS), of_texts(VALID_TEXTS))
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    model = LogisticRegression(C=10, solver="liblinear")
    model.fit(words.fit_transform([x for x, _ in TRAIN_TEXTS]), [y for _, y in TRAIN_TEXTS])
    probabilities = model.predict_proba(words.transform([x for x, _ in VALID_TEXTS]))
    assert found["bag of words"]["loss"] == pytest.approx(log_loss([y for _, y in VALID_TEXTS], probabilities))
    assert found["bag of words"]["accuracy"] == 1.0


def test_a_class_without_a_training_record_is_never_predicted():
    task = adapted(Classification(labels=("0", "1", "2")))
    assert baselines(task, of_texts(TRAIN_TEXTS), of_texts(VALID_TEXTS))["bag of words"]["accuracy"] == 1.0


def test_records_without_a_word_are_the_reason_for_no_bag_of_words():
    with pytest.raises(UserError, match="the training records have no word"):
        baselines(adapted(Classification(labels=("0", "1"))), of_texts([("?!", 0), ("...", 1)]), of_texts(VALID_TEXTS))


def test_records_of_one_label_have_no_bag_of_words():
    task, train = adapted(Classification(labels=("0", "1"))), [("a fine film", 1)] * 3
    assert list(baselines(task, of_texts(train), of_texts(VALID_TEXTS))) == ["label frequencies"]


def test_several_labels_per_record_have_the_frequency_of_each():
    task = adapted(Classification(labels=("good", "film"), multi_label=True))
    train, valid = (
        [{"text": x, "label": ["good"] * y + ["film"] * ("film" in x)} for x, y in pairs]
        for pairs in (TRAIN_TEXTS, VALID_TEXTS)
    )
    found = baselines(task, train, valid)
    assert found["label frequencies"]["f1_micro"] == pytest.approx(6 / 9)  # only "good": 3 of 4 labels, 5 predictions
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    features = words.fit_transform([record["text"] for record in train])
    said = np.zeros((len(valid), 2), bool)
    for i, name in enumerate(("good", "film")):
        model = LogisticRegression(C=10, solver="liblinear").fit(
            features, [name in record["label"] for record in train]
        )
        said[:, i] = model.predict(words.transform([record["text"] for record in valid]))
    right = [set(np.array(["good", "film"])[row]) == set(x["label"]) for row, x in zip(said, valid, strict=True)]
    assert found["bag of words"]["accuracy"] == pytest.approx(np.mean(right))


def test_a_single_label_of_several_labels_per_record_has_a_bag_of_words():
    train, valid = ([{"text": x, "label": ["good"] * y} for x, y in pairs] for pairs in (TRAIN_TEXTS, VALID_TEXTS))
    alone = baselines(adapted(Classification(labels=("good",), multi_label=True)), train, valid)
    of_two = baselines(adapted(Classification(labels=("0", "1"))), of_texts(TRAIN_TEXTS), of_texts(VALID_TEXTS))
    assert alone["bag of words"]["loss"] == pytest.approx(of_two["bag of words"]["loss"])


def test_windows_of_a_record_share_its_baseline():
    task = adapted(Classification(labels=("0", "1"), chunks=tasks.Chunks(stride=4)), length=8)
    valid = [(text + " and a film" * 6, label) for text, label in VALID_TEXTS]
    assert baselines(task, of_texts(TRAIN_TEXTS), of_texts(valid))["label frequencies"]["accuracy"] == 0.6


def test_mean_median_and_bag_of_words_of_a_regression():
    train, valid = ([(x, 2.0 * y + len(x) / 10) for x, y in pairs] for pairs in (TRAIN_TEXTS, VALID_TEXTS))
    found = baselines(adapted(Regression()), of_texts(train), of_texts(valid))
    numbers, truth = np.array([y for _, y in train]), np.array([y for _, y in valid])
    for name in ("mean", "median"):
        constant = DummyRegressor(strategy=name).fit(np.zeros((len(numbers), 1)), numbers).predict([[0]])[0]
        assert found[name]["squared_error"] == pytest.approx(np.square(constant - truth).mean())
        assert found[name]["loss"] == pytest.approx(found[name]["squared_error"]) and found[name]["pearson"] == 0.0
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    model = Ridge(alpha=0.1).fit(words.fit_transform([x for x, _ in train]), numbers)
    predicted = model.predict(words.transform([x for x, _ in valid]))
    # The two solvers have a tolerance of 1e-4.
    assert found["bag of words"]["squared_error"] == pytest.approx(np.square(predicted - truth).mean(), rel=0.01)


def test_the_most_frequent_tag_and_that_of_each_word():
    task = adapted(TokenClassification(labels=("O", "B-X", "I-X")))
    train = [{"tokens": ["a", "fine", "film"], "tags": ["O", "B-X", "I-X"]}] * 2
    train += [{"tokens": ["and", "a", "play"], "tags": ["O", "O", "B-X"]}, {"tokens": ["film"], "tags": ["B-X"]}]
    valid = [{"tokens": ["a", "film", "dull"], "tags": ["O", "B-X", "O"]}, {"tokens": ["fine"], "tags": ["B-X"]}]
    found = baselines(task, train, valid)
    assert found["most frequent tag"]["accuracy"] == 0.5 and found["most frequent tag"]["f1"] == 0.0
    by_word = found["most frequent tag of each word"]  # film: I-X in two of three cases; dull: O
    assert by_word["accuracy"] == 0.75 and by_word["f1"] == 1.0  # conlleval: a span may begin with I-X.
    assert by_word["unread"] == 0.0


def test_f1_of_spans_is_the_ratio_of_its_sums():
    tags = np.array(["O", "B-X", "I-X", "B-Y"])
    said, truth = ([tags[RNG.integers(4, size=n)].tolist() for n in range(1, 30)] for _ in range(2))
    correct, total = span_sums(said, truth)
    assert correct.sum() / total.sum() == pytest.approx(span_metrics(said, truth, "iob2")["f1"])


def test_positions_and_words_of_choices():
    task = adapted(MultipleChoice(choices=2), length=24)
    train = [
        {
            "context": "a",
            "question": "so",
            "choices": ["dull", text] if i % 4 else [text, "dull"],
            "answer": int(i % 4 > 0),
        }
        for i, text in enumerate(GOOD * 3)
    ]
    valid = [{"context": "a", "question": "so", "choices": ["dull", "fine"], "answer": i} for i in (1, 1, 0)]
    found = baselines(task, train, valid)
    assert found["position frequencies"]["accuracy"] == pytest.approx(2 / 3)
    # 9 of 12 answers are the second; one extra count is split evenly.
    assert found["position frequencies"]["loss"] == pytest.approx(-(2 * np.log(9.5 / 13) + np.log(3.5 / 13)) / 3)
    assert found["bag of words"]["accuracy"] == pytest.approx(2 / 3)


def test_the_first_and_the_most_frequent_entity():
    task = adapted(EntityChoice(), length=40)
    train = [{"passage": "Ann met Bo.", "query": "@placeholder left", "entities": ["Ann", "Bo"], "answers": ["Bo"]}]
    valid = [
        {"passage": "Ann met Bo. Bo left.", "query": "@placeholder is", "entities": ["Ann", "Bo"], "answers": ["Bo"]},
        {"passage": "Ann met Bo. Ann left.", "query": "@placeholder is", "entities": ["Bo", "Ann"], "answers": ["Bo"]},
    ]
    found = baselines(task, train, valid)
    assert found["label frequencies: the first entity"]["exact_match"] == 0.5
    assert found["most frequent entity of the passage"]["exact_match"] == 0.5


PASSAGE = "A good play ran here. The old film was dull and bad. Fine and good film."


def question(text, *answers):
    pairs = {"text": list(answers), "answer_start": [PASSAGE.index(answer) for answer in answers]}
    return {"question": text, "context": PASSAGE, "answers": pairs}


@pytest.mark.parametrize("length", [64, 40])
def test_the_first_words_and_the_sentence_that_is_most_similar(length):
    task = adapted(ExtractiveQA(max_question_length=16, stride=8), length=length)
    train = [question("what", "good play"), question("what", "film"), question("what", "old film")]
    valid = [question("what ran", "A good"), question("was the film dull", "The old film was dull and bad")]
    found = baselines(task, train, valid)
    assert found["first 2 words"]["exact_match"] == 0.5
    if length == 64:  # In shorter rows, the sentence may be cut.
        assert found["sentence most similar to the question"]["exact_match"] == 0.5
    assert "no answer" not in found


def test_no_answer_is_a_baseline_if_some_questions_have_none():
    task = adapted(ExtractiveQA(no_answer=True, max_question_length=16, null_score_diff_threshold=5.0), length=64)
    valid = [question("what ran"), question("what", "film"), question("who")]
    found = baselines(task, [question("what", "good play")], valid)
    assert found["no answer"]["exact_match"] == pytest.approx(2 / 3)
    assert found["first 2 words"]["no_answer_accuracy"] == 0.0


def test_tf_idf_finds_a_passage_with_the_words_of_its_query_and_chance_does_not():
    words = [f"w{i}" for i in range(400)]
    records = [
        {"query": f"{words[2 * i]} and", "passage": f"the {words[2 * i]} {words[2 * i + 1]} and so on"}
        for i in range(200)
    ]
    found = baselines(adapted(Retrieval()), records, records)
    assert found["TF-IDF"]["mrr"] > 0.95  # 400 words rarely collide in 16,384 hash buckets
    # The expected reciprocal rank among 200 passages is the mean of 1 / rank: 0.029, with a deviation of 0.007.
    assert found["chance"]["mrr"] < 0.029 + 5 * 0.007


def test_the_most_frequent_answer_and_the_first_sentence():
    task = adapted(TextGeneration(input="{text}\nTL;DR:", target_field="target", answers=None), "gpt")
    train = [{"text": "x", "target": target} for target in ("fine", "dull", "dull")]
    valid = [{"text": "a film. It was dull.", "target": "a film."}, {"text": "so", "target": "dull"}]
    found = baselines(task, train, valid)
    assert found["most frequent answer"]["exact_match"] == found["first sentence of the input"]["exact_match"] == 0.5


def test_generated_labels_have_a_bag_of_words():
    task = adapted(TextGeneration(target_field="label", labels=("bad", "good"), answers=None), "gpt")
    found = baselines(task, of_texts(TRAIN_TEXTS), of_texts(VALID_TEXTS))
    assert found["most frequent answer"]["label_accuracy"] == 0.6 and found["bag of words"]["label_accuracy"] == 1.0


def test_the_source_of_an_instruction_is_the_message_before_the_last_answer():
    messages = [("user", "a film"), ("assistant", "fine"), ("user", "dull play"), ("assistant", "bad")]
    record = {"messages": [{"role": role, "content": content} for role, content in messages]}
    assert Instructions().source_text(Instructions().read(record)) == "dull play"


# --- uneven labels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share, metric", [(0.5, "accuracy"), (0.6, "accuracy"), (0.7, "macro_f1")])
def test_macro_f1_selects_if_more_than_60_percent_of_the_records_have_one_label(share, metric):
    notes = [{"label": int(i < 100 * share)} for i in range(100)]
    found, reason = Classification(labels=("no", "yes")).selection(notes)
    assert found == metric and reason == ("70.0% of the training labels are 'yes'" if share == 0.7 else "")


def test_records_without_a_label_have_a_name_in_the_reason():
    task, notes = Classification(labels=("a", "b"), multi_label=True), [*[{"labels": []}] * 3, {"labels": [0, 1]}]
    assert task.selection(notes) == ("f1", "75.0% of the training labels are 'none'")


def test_the_loss_selects_if_most_words_have_one_tag():
    task = TokenClassification(labels=("N", "V"))
    assert task.selection([{"tags": [0, 0, 0, 1]}]) == ("loss", "75.0% of the training labels are 'N'")
    assert TokenClassification(labels=("O", "B-X")).selection([{"tags": [0, 0, 0, 1]}]) == ("f1", "")


def test_a_task_with_an_official_metric_keeps_it():
    assert AnswerJudgement().selection([{"label": 0}] * 9) == ("f1", "")
