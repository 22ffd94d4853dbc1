"""Tests the start of a run, `config.checkpoint.init_from`, which is validated before the text is read."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from pretrainax.config import UserError
from pretrainax.config.validation import validate
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import TextFiles
from pretrainax.runs.train import train
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.tokenization import PretrainedTokenizer
from tests.golden import CASES
from tests.golden.case import weights
from tests.support import tiny
from tests.support.huggingface_weights import params_of, stored, write_directory, write_run

pytestmark = pytest.mark.slow

MASKED_LM = dataclasses.replace(CASES["bert"].config, pair_head=False)


@pytest.fixture
def bare(tmp_path):
    """Writes BERT in the format of published sentence encoders: a BertModel, with bare names and a pooler."""
    source = write_directory(tmp_path / "bare")
    state = {name: x for name, x in stored(source).items() if name.startswith("bert.")}
    state = {name.removeprefix("bert."): x for name, x in state.items()}
    safetensors.numpy.save_file(state, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    return source


@pytest.fixture
def experiment(text, bare, tmp_path):
    """Makes the config of a run that starts from `bare` with a learning rate of 0."""
    experiment = tiny.get_config("bert")
    experiment.model, experiment.tokenizer = MASKED_LM, PretrainedTokenizer(path=str(bare))
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(tmp_path / "cache")
    experiment.data.sequence_length, experiment.train.steps, experiment.evaluate.batches = 16, 1, 1
    experiment.optimizer.learning_rate, experiment.checkpoint.init_from = 0.0, str(bare)
    return experiment


def by_path(tree):
    return dict(zip(parameter_names(tree), jax.tree.leaves(tree), strict=True))


def test_a_bare_encoder_starts_a_run_with_fresh_heads_that_are_named(experiment, tmp_path, capfd):
    experiment.checkpoint.fresh_heads = True
    assert train(experiment, str(tmp_path / "run")) == 0
    assert "fresh: masked_lm_head/dense, masked_lm_head/norm, unembedding" in " ".join(capfd.readouterr().err.split())
    experiment.checkpoint.init_from, experiment.checkpoint.fresh_heads = None, False
    assert train(experiment, str(tmp_path / "fresh")) == 0
    trained, drawn = (by_path(params_of(tmp_path / name, MASKED_LM)) for name in ("run", "fresh"))
    for path, x in by_path(weights(MASKED_LM)).items():
        is_head = path.split("/")[0] in ("masked_lm_head", "unembedding")
        np.testing.assert_array_equal(trained[path], drawn[path] if is_head else x, err_msg=path)


def test_the_checkpoint_of_a_run_may_lack_heads_too(experiment, tmp_path):
    """A tied decoder has no separate output matrix; a run that requires one initializes it."""
    tied = CASES["gpt2"].config
    run = write_run(tmp_path / "tied", tied)
    experiment.model, experiment.objective = dataclasses.replace(tied, tie_embeddings=False), CausalLM()
    experiment.tokenizer = PretrainedTokenizer(path=str(run / "tokenizer"))
    experiment.checkpoint.init_from = str(run)
    with pytest.raises(
        UserError, match="tie_embeddings is False, there True .unembedding/kernel .*fresh_heads=True initializes heads"
    ):
        train(experiment, str(tmp_path / "run"))
    experiment.checkpoint.fresh_heads = True
    assert train(experiment, str(tmp_path / "run")) == 0
    trained = by_path(params_of(tmp_path / "run", experiment.model))
    assert 0.01 < np.std(trained.pop("unembedding/kernel")) < 0.03  # init_stddev is 0.02
    for path, x in by_path(weights(tied)).items():
        np.testing.assert_array_equal(trained.pop(path), x, err_msg=path)
    assert not trained


@pytest.mark.parametrize(
    "init_from, message",
    [
        ("bare", "is a model without masked_lm_head/dense.*--config.checkpoint.fresh_heads=True"),
        ("t5", "holds another architecture: config.model.head_dim is None, there 8; config.model.position is Learned"),
        ("google-bert/bert-base-uncased", "is named hf:google-bert/bert-base-uncased"),
        (
            "nothing",
            "is neither a run, .* nor a Hugging Face directory, whose config.json has a model_type; there is: nothing",
        ),
        ("decoder", "holds another architecture: config.model.family is 'encoder', there 'decoder'"),
    ],
)
def test_a_start_that_does_not_fit_is_told_before_the_text_is_prepared(init_from, message, experiment, tmp_path):
    (tmp_path / "nothing").mkdir()
    write_directory(tmp_path / "t5", "t5_1_1")
    write_run(tmp_path / "decoder", CASES["gpt2"].config)
    experiment.checkpoint.init_from = init_from if "/" in init_from else str(tmp_path / init_from)
    with pytest.raises(UserError, match=message):
        train(experiment, str(tmp_path / "run"))
    assert not (tmp_path / "cache").exists() and not (tmp_path / "run").exists()


def test_a_start_whose_ids_mean_something_else_is_refused(experiment, tmp_path):
    """A tokenizer with as many ids but other tokens would read the embeddings of other tokens."""
    other = write_run(tmp_path / "other", MASKED_LM, pad_id=1)
    experiment.tokenizer = PretrainedTokenizer(path=str(other / "tokenizer"))
    experiment.checkpoint.fresh_heads = True
    with pytest.raises(UserError, match=r"config.checkpoint.init_from: .* has another tokenizer .*PretrainedTokenizer"):
        train(experiment, str(tmp_path / "run"))


def test_a_run_that_has_saved_no_longer_needs_its_start(experiment, bare, tmp_path):
    experiment.checkpoint.fresh_heads = True
    assert train(experiment, str(tmp_path / "run")) == 0
    (bare / "model.safetensors").unlink()
    assert train(experiment, str(tmp_path / "run")) == 0


def test_fresh_heads_of_nothing_are_a_mistake(experiment):
    experiment.checkpoint.init_from, experiment.checkpoint.fresh_heads = None, True
    with pytest.raises(UserError, match="config.checkpoint.fresh_heads requires config.checkpoint.init_from"):
        validate(experiment)
