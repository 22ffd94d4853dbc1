"""Tests retrieval fine-tuning: its metrics, the vectors on any mesh, and transformers' vectors of an export."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from pretrainax.config import Embed, MeshConfig, UserError
from pretrainax.config.config_file import read_config_file
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines
from pretrainax.inference.load import load
from pretrainax.runs.train import train
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.scoring.record_scores import score_records
from pretrainax.sharding.mesh import make_mesh
from pretrainax.tasks import Retrieval
from pretrainax.training.metrics import read_metrics
from tests.golden import CASES
from tests.golden.case import weights
from tests.support.built import build_run
from tests.support.exports import write_workdir

pytestmark = pytest.mark.slow

WORDS = ["aus", "le", "mir", "ten", "lost", "sie", "wo", "kann", "nun", "bei", "da"]  # one record per word


@pytest.fixture(scope="module")
def experiment(cache, tmp_path_factory):
    """Makes a fine-tuning of a tiny BERT that retrieves the passage with the word of a query."""
    folder, config = tmp_path_factory.mktemp("retrieval"), CASES["bert"].config
    write_workdir(folder / "start", config, weights(config))
    others = [*WORDS[1:], WORDS[0]]
    records = [
        {"query": f"{a} x", "passage": f"so {a}", "worse": [f"so {b}", "so"]}
        for a, b in zip(WORDS, others, strict=True)
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    made = read_config_file("finetune:retrieval", str(folder / "start"))
    made.data.source = JsonLines(path=str(folder / "records.jsonl"), valid_path=str(folder / "records.jsonl"))
    made.data.cache_dir, made.data.prepare_workers, made.data.sequence_length = str(cache), 1, 12
    made.objective = Retrieval(negatives_field="worse", negatives=1, query_length=10)
    made.model.head = Embed(dimensions=(4,))
    made.train.steps, made.train.global_batch_size, made.train.log_every = 60, 8, 10
    made.optimizer.learning_rate, made.schedule.warmup_steps, made.evaluate.every = 3e-3, 2, 30
    made.objective.complete(made)
    return made


@pytest.fixture(scope="module")
def tuned(experiment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("tuned") / "run"
    assert train(dataclasses.replace(experiment), str(workdir)) == 0
    return str(workdir)


@pytest.mark.slow
def test_it_learns_to_find_the_passage(tuned):
    first, last = (line for line in read_metrics(f"{tuned}/metrics.jsonl") if line["split"] == "valid")
    assert last["labels"] == len(WORDS) and last["recall@10"] >= last["recall@1"] >= 0.6
    assert last["loss"] < first["loss"] and last["mrr"] > first["mrr"] >= 0.3


def test_vectors_are_those_of_the_texts_alone_on_one_device_and_on_eight(tuned, experiment):
    prepared = prepare(experiment, report=lambda line: None)
    for devices in (1, 8):
        mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
        with jax.set_mesh(mesh):
            run = build_run(experiment, prepared, mesh, Watchdog())
            loaded = load(tuned, mesh=mesh)
            figures, answers, _ = run.validation.predict(loaded.params)
        np.testing.assert_allclose(answers[:, 0], loaded.embed([f"{word} x" for word in WORDS]), atol=1e-5)
        np.testing.assert_allclose(answers[:, 1], loaded.embed([f"so {word}" for word in WORDS]), atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(answers, axis=-1), 1, atol=1e-5)
    last = read_metrics(f"{tuned}/metrics.jsonl")[-1]
    assert figures["loss"] == pytest.approx(last["loss"], rel=1e-4)


def test_records_of_any_source_are_ranked_as_in_a_validation_and_nothing_is_said_of_one(tuned, experiment):
    loaded, last = load(tuned), read_metrics(f"{tuned}/metrics.jsonl")[-1]
    results = score_records(loaded, loaded.experiment, experiment.data.source)
    assert {result.measure: result.value for result in results} == {
        name: pytest.approx(last[name]) for name in experiment.objective.metric_names
    }
    with pytest.raises(UserError, match=r"embeds texts.*\.embed\(texts\).*evaluate"):
        loaded.predict([{"query": "aus x", "passage": "so aus", "worse": ["so le"]}])
