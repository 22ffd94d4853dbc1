"""Tests that the loss of a config's run is predicted with the interval of its law."""

import dataclasses

import pytest

from pretrainax.config import UserError, to_json
from pretrainax.scaling import prediction
from pretrainax.scaling.power_laws import LossLaw, Run
from tests.support import tiny

LAW = LossLaw(1.5, 300.0, 0.3, 400.0, 0.3, "mine", with_embeddings=False)
RUNS = tuple(Run("", n, d, LAW.loss(n, d)) for n in (10**6, 10**7, 10**8) for d in (1e8, 1e9, 1e10))


def predict(monkeypatch, law, variant="gpt"):
    monkeypatch.setattr(prediction, "law_of", lambda name: law)
    return prediction.predict_loss(tiny.get_config(variant), "law.json")


def test_the_loss_is_the_laws_at_the_runs_n_and_d(monkeypatch):
    found = predict(monkeypatch, LAW)
    assert found.tokens == 40 * 8 * 33 and found.loss == LAW.loss(found.parameters, found.tokens)
    assert found.interval is None and "no interval" in str(found)


def test_the_interval_is_that_of_one_more_run(monkeypatch):
    noisy = tuple(run._replace(loss=run.loss * (1.003, 0.997)[i % 2]) for i, run in enumerate(RUNS))
    found = predict(monkeypatch, dataclasses.replace(LAW, runs=noisy))
    low, high = found.interval
    assert low < found.loss < high and f"90% interval of one run {low:.3f} to {high:.3f}" in str(found)


def test_a_law_that_its_runs_do_not_determine_is_refused(monkeypatch):
    with pytest.raises(UserError, match="--law=law.json is not identified by its runs: E: its interval is 0 to 1$"):
        predict(monkeypatch, dataclasses.replace(LAW, unidentified=("E: its interval is 0 to 1",)))


def test_a_law_of_runs_with_another_tokenizer_has_a_note(monkeypatch):
    same, other = tiny.get_config("gpt"), tiny.get_config("gpt")
    assert "NOTE the law is of other runs" not in str(
        predict(monkeypatch, dataclasses.replace(LAW, config=to_json(same)))
    )
    other.tokenizer.vocab_size, other.model.d_model = 300, 64  # A law is valid for models of all widths.
    found = predict(monkeypatch, dataclasses.replace(LAW, config=to_json(other)))
    note = "NOTE the law is of other runs, whose losses are not comparable: tokenizer.vocab_size: 300 -> 400"
    assert str(found).endswith(note) and found.values()["differences"] == ["tokenizer.vocab_size: 300 -> 400"]


def test_a_law_of_another_family_or_metric_is_refused(monkeypatch):
    with pytest.raises(UserError, match="runs of the family decoder, and config.model.family is encoder"):
        predict(monkeypatch, LAW, "bert")
    with pytest.raises(UserError, match="predicts bits_per_byte, and the run selects by loss"):
        predict(monkeypatch, dataclasses.replace(LAW, metric="bits_per_byte"))


def test_the_prediction_has_the_unit_of_the_metric(monkeypatch):
    experiment = tiny.get_config("gpt")
    experiment.evaluate.select_by = "bits_per_byte"
    law = dataclasses.replace(LAW, metric="bits_per_byte")
    monkeypatch.setattr(prediction, "law_of", lambda name: law)
    text = str(prediction.predict_loss(experiment, "law.json"))
    assert f"bits_per_byte: {law.loss(*prediction.predict(law, experiment)[1:3]):.3f} bits per byte; " in text
    assert "nats" not in text and "uniform" not in text
    assert "nats per token" in str(predict(monkeypatch, LAW))
