"""Tests fine-tuning on tags of words: from CoNLL files, with or without a CRF, with export and import."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from pretrainax.config import Experiment, Extract, MeshConfig, Tag, UserError
from pretrainax.config.config_file import read_config_file
from pretrainax.config.validation import validate
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import ConllFiles
from pretrainax.inference.load import load
from pretrainax.interop import directories
from pretrainax.interop.origin import find_origin
from pretrainax.interop.start import fit_of
from pretrainax.interop.weights import open_start
from pretrainax.runs.train import train
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.tasks import TokenClassification
from pretrainax.tokenization import WordPiece
from pretrainax.tokenization.base import Vocabulary
from pretrainax.training.metrics import read_metrics
from pretrainax.zoo.family import without_heads
from tests.golden import CASES
from tests.support import tiny
from tests.support.built import build_run
from tests.support.classifiers import with_head
from tests.support.huggingface_weights import write_directory

pytestmark = pytest.mark.slow

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TRAIN, VALID = 40, 13  # Sentences; a batch has 8.


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Writes sentences to two files; the last sentence is longer than a row."""
    folder, rng = tmp_path_factory.mktemp("conll"), np.random.RandomState(0)
    names = [("Ada", "B-PER"), ("Byron", "I-PER"), ("in", "O"), ("New", "B-LOC"), ("York", "I-LOC"), ("was", "O")]
    for split, count in (("train", TRAIN), ("valid", VALID)):
        sentences = [list(itertools.islice(itertools.cycle(names), rng.randint(1, 7))) for _ in range(count - 1)]
        sentences.append(names * 5)
        lines = ["".join(f"{word} {tag}\n" for word, tag in sentence) for sentence in sentences]
        (folder / f"{split}.conll").write_text("\n".join(lines))
    return ConllFiles(path=str(folder / "train.conll"), valid_path=str(folder / "valid.conll"))


def tagging(source, cache, variant="bert", head=None, **fields) -> Experiment:
    experiment = read_config_file("finetune:token_classification")
    experiment.model, experiment.tokenizer = tiny.get_config(variant).model, WordPiece(vocab_size=40)
    experiment.model = experiment.model.stacks.get("encoder", experiment.model)  # T5's encoder, as in --config=finetune
    experiment.model.masked_lm_head, experiment.model.head = False, head or Tag()
    experiment.model.norm_at, experiment.model.embedding_norm = ("post", True) if variant == "bert" else ("pre", False)
    experiment.data.source, experiment.data.cache_dir = source, str(cache)
    experiment.data.prepare_workers, experiment.data.sequence_length = 1, 24
    experiment.objective = TokenClassification(labels=LABELS, **fields)
    experiment.train.steps, experiment.train.global_batch_size, experiment.train.log_every = 2, 8, 1
    experiment.evaluate.every = experiment.checkpoint.every = 2
    experiment.schedule.warmup_steps = 1
    experiment.objective.complete(experiment)
    return experiment


def flat(params):
    return dict(zip(parameter_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))


@pytest.fixture(scope="module")
def tagged(source, cache, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tagged") / "run"
    assert train(tagging(source, cache), str(workdir)) == 0
    return workdir


def test_a_validation_has_each_sentence_and_the_figures_of_spans(tagged):
    lines = read_metrics(str(tagged / "metrics.jsonl"))
    (valid,) = (line for line in lines if line["split"] == "valid")
    assert {"precision", "recall", "f1", "strict_f1"} <= valid.keys()
    words = valid["labels"] / (1 - valid["unread"])
    assert words == pytest.approx(round(words)) and 0 < valid["unread"] < 0.5


def test_it_goes_to_transformers_and_back(tagged, tmp_path):
    directories.export_workdir(str(tagged), str(tmp_path / "there"))
    described = json.loads((tmp_path / "there" / "config.json").read_text())
    assert described["architectures"] == ["BertForTokenClassification"]
    assert described["id2label"] == {str(i): name for i, name in enumerate(LABELS)}
    directories.import_directory(str(tmp_path / "there"), str(tmp_path / "back"))
    mine, again = load(str(tagged)), load(str(tmp_path / "back"))
    assert again.config.head == Tag(num_labels=5) and again.experiment.objective == TokenClassification(labels=LABELS)
    theirs = flat(again.params)
    assert all((x == theirs[path]).all() for path, x in flat(mine.params).items())


def test_a_crf_has_no_class_in_transformers(source, cache):
    experiment = tagging(source, cache, head=Tag(kind="crf", follows="auto"))
    experiment.model.vocab_size = 40
    said = "BertForTokenClassification of transformers cannot express config.model.head.kind='crf'$"
    with pytest.raises(UserError, match=said):
        directories.describe_export(experiment, Vocabulary(40, pad=0, cls=1, sep=2))


@pytest.mark.slow
def test_one_device_answers_what_eight_do_that_split_the_length_too(source, cache):
    experiment = tagging(source, cache, "t5", Tag(kind="crf"), subword="mean")
    prepared, found = prepare(experiment, report=lambda line: None), []
    for devices, axes in ((1, MeshConfig()), (8, MeshConfig(sequence=2))):
        mesh = make_mesh(axes, jax.devices()[:devices])
        with jax.set_mesh(mesh):
            run = build_run(experiment, prepared, mesh, Watchdog())
            found.append(run.validation.predict(run.fresh_state().params)[1])
    assert (found[0]["tags"] == found[1]["tags"]).all() and (found[0]["tags"].max(1) >= 0).all()
    np.testing.assert_allclose(found[0]["probabilities"], found[1]["probabilities"], atol=1e-6)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"labels": ("O", "B-PER", "I-PER")}, r"train.conll:\d+: line \d+, word \d, 'New': .*the label 'B-LOC'"),
        (
            {"scheme": "iob1"},
            r"train.conll:\d+: line \d+, word 1, 'Ada', has the tag 'B-PER' at the begin",
        ),
        ({"tags_field": "tag"}, "train.conll:1: no field 'tag', did you mean 'tags'"),
    ],
)
def test_sentences_that_do_not_fit_are_one_line(change, said, source, cache):
    experiment = tagging(source, cache)
    for name, value in change.items():
        setattr(experiment.objective, name, value)
    with pytest.raises(UserError, match=said):
        prepare(experiment, report=lambda line: None)


def test_an_encoder_decoder_is_refused_because_its_decoder_has_not_read_the_word(source, cache):
    experiment = tagging(source, cache, "t5")
    experiment.model.family = "encoder_decoder"
    with pytest.raises(UserError, match="whose decoder has not read the word that it would tag: use --config=finetune"):
        validate(experiment)


@pytest.mark.parametrize("name", ["t5_1_1", "bart"])
@pytest.mark.parametrize("task", ["conll2003", "squad"])
def test_a_head_of_tokens_takes_the_encoder_of_an_encoder_decoder(name, task, tmp_path):
    start = str(write_directory(tmp_path / name, name))
    experiment = read_config_file(f"finetune:{task}", start)
    experiment.objective.complete(experiment)
    assert experiment.model.family == "encoder"
    assert not fit_of(find_origin(start), experiment.model, fresh_heads=True).changed


def test_a_model_that_finds_answers_with_its_decoder_keeps_it(tmp_path):
    start = str(write_directory(tmp_path / "bart", with_head("bart", Extract())))
    assert read_config_file("finetune:squad", start).model.family == "encoder_decoder"


def test_what_is_repaired_is_said(source, cache):
    experiment = tagging(source, cache, scheme="iob1", repair=True)
    prepared = prepare(experiment, report=lambda line: None)
    assert "wrong beginnings of spans, mended" in prepared.summary


# --- initial parameters -----------------------------------------------------------------------------------------------


def plain(name, **fields):
    """Returns the model of a case, without its pretraining heads."""
    return dataclasses.replace(without_heads(CASES[name].config), **fields)


def test_an_encoder_is_taken_of_an_encoder_decoder(tmp_path):
    """Checks a start from a Hugging Face directory and from a run."""
    directory, workdir = write_directory(tmp_path / "there", "t5_1_1"), str(tmp_path / "run")
    directories.import_directory(str(directory), workdir)
    for start in (str(directory), workdir):
        fit = fit_of(find_origin(start), plain("t5_1_1", family="encoder", head=Tag(num_labels=3)), fresh_heads=True)
        assert fit.missing_head_paths == ["tagger/output/bias", "tagger/output/kernel"]
        assert all(path == there and not path.startswith("decoder") for path, there in fit.sources.items())
        assert {path.partition("/")[0] for path in fit.unused_paths} <= {"decoder", "unembedding"}


@pytest.mark.parametrize("name, kind, own", [("bert", "crf", ("start", "end", "transitions")), ("bart", "softmax", ())])
def test_what_transformers_has_no_name_for_is_drawn(name, kind, own, tmp_path):
    """Checks the transitions of a CRF, and a tagging head for a family without one."""
    directory = str(write_directory(tmp_path / "there", name))
    source = open_start(directory, plain(name, head=Tag(num_labels=3, kind=kind)), fresh_heads=True)
    assert set(source.missing_head_paths) == {f"tagger/{part}" for part in ("output/kernel", "output/bias", *own)}
