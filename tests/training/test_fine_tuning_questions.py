"""Tests tasks with several rows per record: each record counts once, on any mesh, and exports round-trip."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from pretrainax.config import Experiment, Extract, MeshConfig, RandomBlocks, SlidingWindows, Tag
from pretrainax.config.config_file import read_config_file
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines
from pretrainax.inference import predictions
from pretrainax.inference.load import load
from pretrainax.interop import directories
from pretrainax.runs.train import train
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.tasks import EntityChoice, ExtractiveQA, MultipleChoice, label_metrics
from pretrainax.tokenization import ByteBPE, WordPiece
from pretrainax.training.metrics import read_metrics
from pretrainax.zoo.family import without_heads
from tests.golden import CASES
from tests.support import tiny
from tests.support.built import build_run
from tests.support.huggingface_weights import write_directory
from tests.support.tiers import few

pytestmark = pytest.mark.slow

TRAIN, VALID = 24, 13  # Records; a batch has 16.
WORDS = "the red fox saw a small dog near old house and ran into green forest where birds sing".split()


def written(folder, records) -> JsonLines:
    for split, made in (("train", records[:TRAIN]), ("valid", records[TRAIN:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made))
    return JsonLines(path=str(folder / "train.jsonl"), valid_path=str(folder / "valid.jsonl"))


def records_of(source: JsonLines, without: str = "") -> list[dict]:
    """Returns the records of the validation, without the field `without`."""
    lines = pathlib.Path(source.valid_path).read_text().splitlines()
    return [{name: x for name, x in json.loads(line).items() if name != without} for line in lines]


def tuning(name: str, source: JsonLines, cache, task) -> Experiment:
    experiment = read_config_file(f"finetune:{name}")
    experiment.model = without_heads(tiny.get_config("bert").model)
    experiment.model.norm_at, experiment.model.embedding_norm = "post", True
    experiment.model.dropout_rate = experiment.model.attention_dropout_rate = 0.0
    experiment.tokenizer, experiment.objective = WordPiece(vocab_size=80), task
    experiment.data.source, experiment.data.cache_dir = source, str(cache)
    experiment.data.prepare_workers, experiment.data.sequence_length = 1, 24
    experiment.train.steps, experiment.train.global_batch_size, experiment.train.log_every = 2, 16, 1
    experiment.evaluate.every = experiment.checkpoint.every = 2
    experiment.schedule.warmup_steps = 1
    task.complete(experiment)
    return experiment


def answers_on(experiment, workdir, devices: int):
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    with jax.set_mesh(mesh):
        run = build_run(experiment, prepare(experiment, report=lambda line: None), mesh, Watchdog())
        return run.validation.predict(load(str(workdir), mesh=mesh).params)


def flat(params):
    return dict(zip(parameter_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))


def there_and_back(workdir, folder, architecture: str):
    """Exports and imports the model of a run, and checks that its parameters are the same."""
    directories.export_workdir(str(workdir), str(folder / "there"))
    described = json.loads((folder / "there" / "config.json").read_text())
    assert described["architectures"] == [architecture]
    directories.import_directory(str(folder / "there"), str(folder / "back"))
    mine, again = load(str(workdir)), load(str(folder / "back"))
    theirs = flat(again.params)
    assert all((x == theirs[path]).all() for path, x in flat(mine.params).items())
    return again


# --- multiple choice --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def choices(tmp_path_factory):
    rng = np.random.RandomState(0)
    text = lambda most: " ".join(rng.choice(WORDS, rng.randint(1, most)))  # noqa: E731
    made = [
        {"context": text(30), "question": text(4), "choices": [text(5) for _ in range(3)], "answer": "ABC"[i % 3]}
        for i in range(TRAIN + VALID)
    ]
    return written(tmp_path_factory.mktemp("choices"), made)


@pytest.fixture(scope="module")
def chooser(choices, cache, tmp_path_factory):
    experiment, workdir = (
        tuning("choice", choices, cache, MultipleChoice(choices=3)),
        tmp_path_factory.mktemp("chooser"),
    )
    experiment.train.accumulate = 2
    assert train(experiment, str(workdir / "run")) == 0
    return experiment, workdir / "run"


@pytest.mark.slow
def test_each_record_is_asked_once_with_all_of_its_choices_on_any_mesh(chooser):
    experiment, workdir = chooser
    (_, one, notes), (_, eight, _) = (answers_on(experiment, workdir, devices) for devices in (1, 8))
    assert one.shape == (VALID, 3) and [note["label"] for note in notes] == [(TRAIN + i) % 3 for i in range(VALID)]
    np.testing.assert_allclose(one, eight, atol=1e-6)
    (line,) = (line for line in read_metrics(str(workdir / "metrics.jsonl")) if line["split"] == "valid")
    assert line["labels"] == VALID
    assert line["accuracy"] == pytest.approx(experiment.objective.metrics(one, notes)["accuracy"])


@pytest.mark.slow
def test_micro_batches_part_no_record(chooser, cache, choices, tmp_path):
    experiment = tuning("choice", choices, cache, MultipleChoice(choices=3))
    assert train(experiment, str(tmp_path)) == 0
    whole, parted = (
        [line for line in read_metrics(str(folder / "metrics.jsonl")) if line["split"] == "train"]
        for folder in (tmp_path, chooser[1])
    )
    assert len(whole) == 2 and whole[0]["labels"] == 16
    for a, b in zip(whole, parted, strict=True):
        names = ("loss", "accuracy", "labels", "gradient_norm")
        assert [a[name] for name in names] == pytest.approx([b[name] for name in names], rel=1e-4)


def test_a_chooser_says_the_same_of_records_without_answers(chooser, choices):
    experiment, workdir = chooser
    loaded = load(str(workdir))
    said = list(predictions.predict(loaded, predictions.task_of(loaded), records_of(choices, without="answer")))
    right = [each["prediction"] == "ABC"[(TRAIN + i) % 3] for i, each in enumerate(said)]
    (line,) = (line for line in read_metrics(str(workdir / "metrics.jsonl")) if line["split"] == "valid")
    assert len(said) == VALID and np.mean(right) == pytest.approx(line["accuracy"])
    assert all(sum(each["probabilities"].values()) == pytest.approx(1.0, abs=1e-4) for each in said)


def test_a_chooser_goes_to_transformers_and_back(chooser, tmp_path):
    again = there_and_back(chooser[1], tmp_path, "BertForMultipleChoice")
    assert (again.config.head.kind, again.config.head.num_labels) == ("choice", 3)
    assert again.experiment.objective == MultipleChoice(choices=3)


# --- answers in passages ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def passages(tmp_path_factory):
    """Writes records with passages of one to three windows; the fifth of each six records has no answer."""
    rng, made = np.random.RandomState(1), []
    for i in range(TRAIN + VALID):
        words = rng.choice(WORDS, 8 + 6 * (i % 6)).tolist()
        first = rng.randint(len(words) - 2)
        answer, start = " ".join(words[first : first + 2]), len(" ".join([*words[:first], ""]))
        right = {"text": [answer], "answer_start": [start]} if i % 6 != 4 else {"text": [], "answer_start": []}
        made.append({"question": "Where is it", "context": " ".join(words), "answers": right})
    return written(tmp_path_factory.mktemp("passages"), made)


# Cases of the zoo: Longformer, whose question tokens are global, and BigBird, whose head has more layers.
OF_ANSWERS = {"bert": "Bert", "longformer": "Longformer", "bigbird_pairs": "BigBird"}


@pytest.fixture(scope="module", params=few(OF_ANSWERS, ["longformer"]))
def finder(request, passages, cache, tmp_path_factory):
    task = ExtractiveQA(no_answer=True, stride=8, max_question_length=8)
    experiment, workdir = tuning("answers", passages, cache, task), tmp_path_factory.mktemp("finder")
    if request.param != "bert":
        case = CASES[request.param]
        found, position = (
            case.family.huggingface.question_answering_class,
            dataclasses.replace(case.config.position, max_length=30),
        )
        model = found.apply_to(without_heads(case.config))
        if request.param == "longformer":  # positions depend on padding; two separators
            experiment.tokenizer = ByteBPE(vocab_size=280, special_pieces="roberta")
        sizes = dict(num_layers=2, vocab_size=experiment.model.vocab_size, dropout_rate=0.0, attention_dropout_rate=0.0)
        experiment.model = dataclasses.replace(model, head=found.head, position=position, **sizes)
    experiment.data.sequence_length = 30
    assert train(experiment, str(workdir / "run")) == 0
    return experiment, workdir / "run"


@pytest.mark.parametrize(
    "name, task, windows, head",
    [
        ("longformer", "squad", SlidingWindows("question"), Extract()),
        (
            "longformer",
            "conll2003",
            SlidingWindows("first"),
            Tag(),
        ),  # transformers' class has no global projections, so an export would lose them.
        ("bigbird_pairs", "squad", RandomBlocks(2, 1), Extract(feed_forward=True, second_text=True)),
    ],
)
def test_a_start_becomes_what_its_class_for_the_task_is(name, task, windows, head, tmp_path):
    model = read_config_file(f"finetune:{task}", str(write_directory(tmp_path / name, name))).model
    assert (model.sparse_attention, model.head) == (windows, head)
    assert model.sparse_attention is not CASES[name].family.huggingface.question_answering_class.changes.get(
        "sparse_attention"
    )


def test_windows_are_rows_and_figures_are_of_records(finder):
    experiment, workdir = finder
    (_, one, notes), (_, eight, _) = (answers_on(experiment, workdir, devices) for devices in (1, 8))
    np.testing.assert_allclose(one, eight, atol=1e-5)
    assert one.shape == (len(notes), 30, 2) and len(notes) > VALID
    assert [note["window"] for note in notes].count(0) == VALID
    (line,) = (line for line in read_metrics(str(workdir / "metrics.jsonl")) if line["split"] == "valid")
    assert line["labels"] == len(notes)
    found = experiment.objective.metrics(one, notes)
    assert found.keys() == set(experiment.objective.metric_names) and line.items() >= found.items()


def test_a_finder_says_the_same_of_records_without_answers(finder, passages):
    experiment, workdir = finder
    loaded = load(str(workdir))
    said = list(predictions.predict(loaded, predictions.task_of(loaded), records_of(passages, without="answers")))
    truth = [record["answers"]["text"] for record in records_of(passages)]
    found = label_metrics.answer_metrics([each["prediction"] for each in said], truth, some_have_none=True)
    (line,) = (line for line in read_metrics(str(workdir / "metrics.jsonl")) if line["split"] == "valid")
    assert {name: line[name] for name in found} == pytest.approx(found)


@pytest.mark.slow
def test_a_finder_learns_which_words_are_answers(cache, tmp_path):
    rng, made = np.random.RandomState(3), []
    others = [word for word in WORDS if word not in ("fox", "dog")]
    for i in range(TRAIN + VALID):
        words, place, answer = rng.choice(others, 10).tolist(), rng.randint(10), ("fox", "dog")[i % 2]
        words[place] = answer
        right = {"text": [answer], "answer_start": [len(" ".join([*words[:place], ""]))]}
        made.append({"question": "Who is it", "context": " ".join(words), "answers": right})
    experiment = tuning("answers", written(tmp_path, made), cache, ExtractiveQA(stride=8, max_question_length=8))
    experiment.data.sequence_length, experiment.optimizer.learning_rate = 30, 3e-3
    experiment.train.steps = experiment.evaluate.every = experiment.checkpoint.every = 60
    assert train(experiment, str(tmp_path / "run")) == 0
    (line,) = (line for line in read_metrics(str(tmp_path / "run" / "metrics.jsonl")) if line["split"] == "valid")
    assert line["exact_match"] == line["answer_f1"] == 1.0


def test_a_finder_goes_to_transformers_and_back(finder, tmp_path, request):
    name = OF_ANSWERS[request.node.callspec.params["finder"]]
    again = there_and_back(finder[1], tmp_path, f"{name}ForQuestionAnswering")
    assert again.config.head == finder[0].model.head and isinstance(again.experiment.objective, ExtractiveQA)


# --- entities in gaps -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_entities_are_examples_and_figures_are_of_records(cache, tmp_path):
    rng, made = np.random.RandomState(2), []
    for i in range(TRAIN + VALID):
        entities = rng.choice(WORDS, 2 + i % 4, replace=False).tolist()
        query = {"query": "the @placeholder ran", "entities": entities, "answers": [entities[i % 2]]}
        made.append({"passage": " ".join(rng.choice(WORDS, 6)), **query})
    source = written(tmp_path, made)
    experiment = tuning("record", source, cache, EntityChoice())
    experiment.optimizer.learning_rate = 1e-2  # Or all entities would stay almost equally likely.
    assert train(experiment, str(tmp_path / "run")) == 0
    (line,) = (line for line in read_metrics(str(tmp_path / "run" / "metrics.jsonl")) if line["split"] == "valid")
    assert line["labels"] == sum(len(record["entities"]) for record in made[TRAIN:]) > VALID
    loaded = load(str(tmp_path / "run"))
    said = list(predictions.predict(loaded, predictions.task_of(loaded), records_of(source, without="answers")))
    right = [each["prediction"] in record["answers"] for each, record in zip(said, records_of(source), strict=True)]
    assert len(said) == VALID and np.mean(right) == pytest.approx(line["exact_match"])
