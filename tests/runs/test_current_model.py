"""The model that a run uses for generation and scores computes the same as the model loaded after the run."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from pretrainax import models
from pretrainax.data.objectives import CausalLM
from pretrainax.inference.request import Sampling
from pretrainax.runs import answer_writer, samples
from pretrainax.runs.current_model import current_model
from pretrainax.runs.task_evaluation import TaskEvaluation
from pretrainax.tasks import Instructions
from tests.support.loaded import loaded_case

LOADED = loaded_case("mixtral")


@pytest.fixture
def run():
    """Returns a run whose experts drop each token above an even load."""
    config = LOADED.experiment.model
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, capacity=1.0))
    model = models.build(config, LOADED.model.compute)
    experiment = dataclasses.replace(LOADED.experiment, model=config, objective=CausalLM())
    experiment.evaluate.prompts = ("ab",)
    prepared = SimpleNamespace(tokenizer=LOADED.tokenizer)
    return SimpleNamespace(
        experiment=experiment,
        trained=experiment,
        prepared=prepared,
        mesh=LOADED.mesh,
        peers=SimpleNamespace(progress=lambda: None),
        plain=lambda params: (model, params),
    )


def test_its_experts_drop_no_tokens(run):
    current = current_model(run, LOADED.params)
    batch = {name: np.ones((3, 8), np.int32) for name in ("tokens", "positions", "segment_ids")}
    with_capacity = dataclasses.replace(LOADED, model=run.plain(None)[0])
    assert not np.array_equal(with_capacity(batch).logits, LOADED(batch).logits)
    np.testing.assert_array_equal(current(batch).logits, LOADED(batch).logits)
    assert current.experiment.model == LOADED.experiment.model


def test_samples_tasks_and_answers_use_it(run, monkeypatch):
    used = [TaskEvaluation()._loaded(run, LOADED.params)]
    monkeypatch.setattr(samples, "prompted", lambda loaded, *_: used.append(loaded) or [])
    samples.show_samples(run, LOADED.params, lambda line: None)

    def generate(loaded, prompts, sampling: Sampling):
        used.append(loaded)
        assert sampling.stop == ("<end>",)
        return []

    monkeypatch.setattr(answer_writer, "generate_examples", generate)
    template = "{% for m in messages %}{{ m.role + m.content + '<end>' }}{% endfor %}"
    template += "{{ 'assistant' if add_generation_prompt }}"
    task = Instructions(template=template).bind(LOADED.tokenizer)
    stream = SimpleNamespace(objective=task, prefetch=list, note=int)
    run.validation = SimpleNamespace(valid_batches=SimpleNamespace(streams=[stream], rows_per_epoch=0))
    answer_writer.AnswerWriter()(run, LOADED.params, stream.objective)
    assert [loaded.model.config.experts.capacity for loaded in used] == [None] * 3


def test_a_phase_with_another_config_uses_its_own(run):
    """Phases of a run can have other positions; compiled functions are reused only if the model is the same."""
    evaluation = TaskEvaluation()
    first, again = (evaluation._loaded(run, LOADED.params) for _ in range(2))
    config = run.trained.model
    position = dataclasses.replace(config.position, theta=20.0)
    run.trained = dataclasses.replace(run.trained, model=dataclasses.replace(config, position=position))
    later = evaluation._loaded(run, LOADED.params)
    assert again._compiled is first._compiled and later._compiled is not first._compiled
    assert again._shared_cache is first._shared_cache and later._shared_cache is not first._shared_cache
