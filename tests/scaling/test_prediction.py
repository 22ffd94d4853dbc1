"""The loss of a config's run is predicted with the interval of its law."""

import dataclasses

import pytest

from pretrainax.config import UserError
from pretrainax.scaling import prediction
from pretrainax.scaling.power_laws import LossLaw
from tests.support import tiny

LAW = LossLaw(1.5, 300.0, 0.3, 400.0, 0.3, "mine", with_embeddings=False)
LAWS = tuple(dataclasses.replace(LAW, E=1 + i / 100) for i in range(101))


def predict(monkeypatch, law, variant="gpt"):
    monkeypatch.setattr(prediction, "law_of", lambda name: law)
    return prediction.predict_loss(tiny.get_config(variant), "law.json")


def test_the_loss_is_the_laws_at_the_runs_n_and_d(monkeypatch):
    found = predict(monkeypatch, LAW)
    assert found.tokens == 40 * 8 * 33 and found.loss == LAW.loss(found.parameters, found.tokens)
    assert found.interval is None and "no interval" in str(found)


def test_the_interval_is_that_of_the_resamples(monkeypatch):
    found = predict(monkeypatch, dataclasses.replace(LAW, resampled=LAWS))
    low, high = found.interval
    assert high - low == pytest.approx(0.95) and f"95% interval {low:.3f} to {high:.3f}" in str(found)


def test_a_law_of_another_family_or_metric_is_refused(monkeypatch):
    with pytest.raises(UserError, match="runs of the family decoder, and config.model.family is encoder"):
        predict(monkeypatch, LAW, "bert")
    with pytest.raises(UserError, match="predicts bits_per_byte, and the run selects by loss"):
        predict(monkeypatch, dataclasses.replace(LAW, metric="bits_per_byte"))
