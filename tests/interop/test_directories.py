"""Imports and exports of Hugging Face directories preserve every bit."""

import dataclasses
import errno
import json
import os
import pathlib
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import pretrainax
from pretrainax import config as config_lib
from pretrainax.config import Classify, Embed, RunFailed, UserError
from pretrainax.data.sources import TextFiles
from pretrainax.interop import directories, sentence_transformers
from pretrainax.interop.weights import DirectoryWeights
from pretrainax.models import electra
from pretrainax.runs.train import train
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.tokenization import Words
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.zoo.family import differences
from tests.golden import CASES
from tests.golden.case import batch, needs_transformers, weights
from tests.golden.electra import joint
from tests.support.classifiers import named_labels, with_head
from tests.support.exports import assert_all_taken
from tests.support.huggingface_weights import (
    PUBLISHED,
    assert_same,
    params_of,
    stored,
    write_directory,
    write_run,
    write_tokenizer,
)
from tests.support.loaded import letters
from tests.support.parity import ours
from tests.support.runs import FAST
from tests.support.tiers import few

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    return write_directory(tmp_path / "source")


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.first(1)
@pytest.mark.parametrize("name", few(CASES))
def test_import_and_export_keep_every_bit(name, tmp_path):
    source = write_directory(tmp_path / "source", name)
    directories.import_directory(str(source), str(tmp_path / "run"))
    imported = config_lib.load(tmp_path / "run" / "config.json").model
    assert_same(params_of(tmp_path / "run", imported), weights(CASES[name].config))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"), shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    a, b = stored(source), stored(tmp_path / "out")
    assert a.keys() == b.keys()
    assert all(a[key].tobytes() == b[key].tobytes() and a[key].dtype == b[key].dtype for key in a)
    directories.import_directory(str(tmp_path / "out"), str(tmp_path / "again"))
    assert_same(params_of(tmp_path / "again", imported), weights(CASES[name].config))


@pytest.mark.slow
def test_parameters_go_through_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pretrainax.checkpoints.params._BLOCK_BYTES", 300
    )  # the block size does not divide rows, heads or layers
    test_import_and_export_keep_every_bit("t5_1_1", tmp_path)


@pytest.mark.first(2)
@needs_transformers
@pytest.mark.parametrize("name", few(PUBLISHED))
def test_transformers_saves_what_we_read_and_loads_what_we_write(name, tmp_path):
    import torch
    import transformers

    from tests.golden import make

    case = CASES[name]
    theirs = make.oracle(case)
    theirs.save_pretrained(tmp_path / "source", max_shard_size="30KB")
    write_tokenizer(tmp_path / "source", case.pad_id)
    directories.import_directory(str(tmp_path / "source"), str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    again, info = type(theirs).from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert_all_taken(info, tmp_path / "out")
    with torch.no_grad():
        a, b = (make.forward(case, model.eval(), batch(case)) for model in (theirs, again))
    for key in a:
        # The same program on the same bits: at another address, torch may sum in another order.
        np.testing.assert_allclose(a[key], b[key], rtol=0, atol=2e-6, err_msg=key)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("a cab.", add_special_tokens=False).input_ids).replace(" ", "") == "acab."


@pytest.mark.slow
@needs_transformers
def test_the_encoder_of_deberta_v3_is_loaded_without_the_authors_head(tmp_path):
    import torch
    import transformers

    directories.import_directory(str(write_directory(tmp_path / "source", "deberta_v3")), str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    theirs, info = transformers.DebertaV2Model.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and all(name.startswith("mask_predictions.") for name in info["unexpected_keys"])
    arrays = batch(CASES["deberta_v3"])
    with torch.no_grad():
        out = theirs.eval()(torch.from_numpy(arrays["tokens"]).long(), torch.from_numpy(arrays["segment_ids"]).long())
    real = arrays["segment_ids"] > 0
    got = ours("deberta_v3")["output encoder"][real]
    np.testing.assert_allclose(got, out.last_hidden_state.numpy()[real], atol=2e-4, rtol=0)  # as in all parity tests


@pytest.mark.first(1)
@pytest.mark.parametrize("part", ["discriminator", "generator"])
@pytest.mark.parametrize("sharing", ["all", "gradient_disentangled"])
def test_either_part_of_an_electra_is_exported(sharing, part, tmp_path):
    config = joint(sharing)
    write_run(tmp_path / "run", config)
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"), part=part)
    source = DirectoryWeights(str(tmp_path / "out"))
    wanted_config, wanted = getattr(electra, part)(config, weights(config))
    assert differences(source.config, wanted_config) == []
    for path, x in zip(parameter_names(wanted), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(source.read(path, (slice(None),) * x.ndim), x, err_msg=path)


def test_a_part_of_a_run_without_a_generator_is_an_error(tmp_path):
    write_run(tmp_path / "run", CASES["bert"].config)
    with pytest.raises(UserError, match="^--part=generator is for ELECTRA models, and this model has no"):
        directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"), part="generator")


def test_bfloat16_is_kept(tmp_path):
    source = write_directory(tmp_path / "source", "llama3", ml_dtypes.bfloat16)
    directories.import_directory(str(source), str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    a, b = stored(source), stored(tmp_path / "out")
    assert {x.dtype.name for x in b.values()} == {"bfloat16"}
    assert all(a[key].tobytes() == b[key].tobytes() for key in a)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "wide"), dtype="float32")
    assert all(a[key].astype(np.float32).tobytes() == x.tobytes() for key, x in stored(tmp_path / "wide").items())


@pytest.mark.parametrize("name", ["cls.predictions.bias", "bert.encoder.layer.1.output.dense.weight"])
def test_values_that_float16_cannot_represent_are_an_error(name, source, tmp_path):
    """These values became infinite, so the exported directory could not be loaded."""
    state = stored(source)
    state[name] = np.full_like(state[name], -7e4)
    safetensors.numpy.save_file(state, source / "model.safetensors")
    directories.import_directory(str(source), str(tmp_path / "run"))
    with pytest.raises(UserError, match=f"{name} has values up to 70000, which are not finite in float16: set --dtype"):
        directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"), dtype="float16")
    assert not (tmp_path / "out").exists()
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"), dtype="bfloat16")


def test_two_exports_are_the_same_files(source, tmp_path):
    directories.import_directory(str(source), str(tmp_path / "run"))
    for name in ("a", "b"):
        directories.export_workdir(str(tmp_path / "run"), str(tmp_path / name))
    a, b = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b


def write_settings(directory, **settings):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_config_and_tokenizer_travel_along(source, tmp_path):
    directories.import_directory(str(source), str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    a, b = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert a.items() <= (b | {"pad_token_id": a.get("pad_token_id")}).items()
    assert (b["pad_token_id"], b["dtype"]) == (0, "float32")
    assert read_tokenizer(str(source)).fingerprint == read_tokenizer(str(tmp_path / "out")).fingerprint


def test_settings_of_training_that_we_do_not_read_travel_along():
    vocabulary = letters().vocabulary
    experiment = directories.evaluation_of(CASES["bert"].config, vocabulary, "")
    for model_type, kept in (("bert", 0.3), ("roberta", None)):
        imported = {"model_type": model_type, "classifier_dropout": 0.3, "hidden_dropout_prob": 0.7}
        _, config_json, _ = directories.describe_export(experiment, vocabulary, None, imported)
        assert config_json.get("classifier_dropout") == kept
        assert config_json["hidden_dropout_prob"] == experiment.model.dropout_rate != 0.7


def test_the_dropout_of_embeddings_is_reported_and_travels_along(tmp_path):
    """Here, embeddings have the rate of the sublayers: resid_pdrop in GPT-2."""
    source = write_directory(tmp_path / "source", CASES["gpt2"])
    for rate, is_reported in ((0.0, True), (0.1, False)):
        run, out = tmp_path / f"run{rate}", tmp_path / f"out{rate}"
        write_settings(source, embd_pdrop=rate, resid_pdrop=0.1, summary_first_dropout=0.3)
        line = directories.import_directory(str(source), str(run))
        assert ("embd_pdrop 0.0 is not used: embeddings have config.model.dropout_rate 0.1" in line) == is_reported
        assert "summary" not in line
        directories.export_workdir(str(run), str(out))
        exported = json.loads((out / "config.json").read_text())
        assert (exported["embd_pdrop"], exported["resid_pdrop"], exported["summary_first_dropout"]) == (rate, 0.1, 0.3)


def test_a_dropout_that_no_layer_has_is_reported(tmp_path):
    source = write_directory(tmp_path / "source", CASES["bart"])
    write_settings(source, activation_dropout=0.2, encoder_layerdrop=0.0, classifier_dropout=0.4)
    notes = DirectoryWeights(str(source)).notes()
    assert notes == ["activation_dropout 0.2 is not used: this package has no such dropout"]


def test_the_dropout_of_a_head_is_read_and_travels_along(tmp_path):
    source = write_directory(tmp_path / "source", with_head("bert"))
    write_settings(source, classifier_dropout=0.4, hidden_dropout_prob=0.3)
    directories.import_directory(str(source), str(tmp_path / "run"))
    head = config_lib.load(str(tmp_path / "run" / "config.json")).model.head
    assert head.dropout_rate == 0.4
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["classifier_dropout"], exported["hidden_dropout_prob"]) == (0.4, 0.3)


def test_the_maximum_length_of_an_imported_marian_travels_along():
    vocabulary = letters().vocabulary
    experiment = directories.evaluation_of(CASES["transformer"].config, vocabulary, "")
    for imported in ({"model_type": "marian", "max_position_embeddings": 512}, {}):  # by default, the class has 1,024
        _, config_json, _ = directories.describe_export(experiment, vocabulary, None, imported)
        assert config_json.get("max_position_embeddings") == imported.get("max_position_embeddings")


@needs_transformers
@pytest.mark.parametrize("has_files", [True, False])
def test_named_chat_templates_travel_along(has_files, source, tmp_path):
    """Tests templates in files, and in the list that transformers before 4.52 wrote to tokenizer_config.json."""
    import transformers

    templates = {"default": "{{ messages }}", "rag": "{{ documents }}"}
    if has_files:
        (source / "chat_template.jinja").write_text(templates["default"])
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "rag.jinja").write_text(templates["rag"])
    else:
        path = source / "tokenizer_config.json"
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        path.write_text(json.dumps(json.loads(path.read_text() if path.exists() else "{}") | {"chat_template": listed}))
    directories.import_directory(str(source), str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates


def test_pooling_and_inputs_of_an_embedding_model_travel_along(source, tmp_path):
    head = Embed(pooling="cls", normalize=True)
    sentence_transformers.write_modules(str(source), dataclasses.replace(CASES["bert"].config, head=head))
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 7, "do_lower_case": true}')
    directories.import_directory(str(source), str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    expected = sentence_transformers.Modules(head, max_length=7, lowercase=True)
    assert sentence_transformers.read_modules(str(tmp_path / "out")) == expected


def test_labels_of_equal_names_are_numbered(tmp_path):
    """transformers loads such a classifier too, but its pipeline writes the same name for several labels."""
    source = write_directory(tmp_path / "source", with_head("bert"))
    named_labels(source, "good", "bad", "good")
    line = directories.import_directory(str(source), str(tmp_path / "run"))
    assert "labels of equal names in id2label were renamed to good#0, good#2" in line
    (prediction,) = pretrainax.load(tmp_path / "run").predict(["a cat"])
    assert list(prediction["probabilities"]) == ["good#0", "bad", "good#2"]


@pytest.mark.parametrize(
    "settings, ids",
    [
        ({"id2label": {"1": "a", "2": "b", "3": "c"}}, "1, 2, 3"),
        ({"id2label": {"0": "a", "1": "b", "3": "c"}}, "0, 1, 3"),
        ({"id2label": {"0": "a", "1": "b"}, "num_labels": 3}, "0, 1"),
    ],
)
def test_labels_with_other_ids_are_reported(tmp_path, settings, ids):
    source = write_directory(tmp_path / "source", with_head("bert"))
    write_settings(source, **settings)
    line = directories.import_directory(str(source), str(tmp_path / "run"))
    assert f"id2label were replaced by LABEL_0, LABEL_1, …: its ids are {ids}, they must be 0 to 2" in line
    assert config_lib.load(str(tmp_path / "run" / "config.json")).objective.labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_the_name_of_a_regression_travels_along(tmp_path):
    source = write_directory(tmp_path / "source", with_head("bert", Classify(num_labels=1, kind="regression")))
    named_labels(source, "grade")
    directories.import_directory(str(source), str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {"0": "grade"}


def test_tensors_of_several_dtypes_stay_as_they_are(source, tmp_path):
    dtypes = [np.float32, ml_dtypes.bfloat16, np.float16]
    state = {name: x.astype(dtypes[i % 3]) for i, (name, x) in enumerate(sorted(stored(source).items()))}
    safetensors.numpy.save_file(state, source / "model.safetensors")
    directories.import_directory(str(source), str(tmp_path / "run"))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    again = stored(tmp_path / "out")
    assert {name: (x.dtype, x.tobytes()) for name, x in again.items()} == {
        name: (x.dtype, x.tobytes()) for name, x in state.items()
    }
    # transformers uses float32 for all of them: a narrower dtype would lose precision.
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_float64_is_said_to_become_float32(source, tmp_path):
    state = stored(source)
    state["cls.predictions.bias"] = state["cls.predictions.bias"].astype(np.float64)
    safetensors.numpy.save_file(state, source / "model.safetensors")
    said = directories.import_directory(str(source), str(tmp_path / "run"))
    assert said.endswith("; 1 tensors of float64 were converted to float32")


def test_a_tokenizer_with_more_ids_than_rows_is_not_exported(tmp_path):
    run = write_run(tmp_path / "run", CASES["gpt2"].config, pad_id=120)
    with pytest.raises(UserError, match="the tokenizer has 121 ids, and the model 99 rows of embeddings"):
        directories.export_workdir(str(run), str(tmp_path / "out"))


@pytest.mark.parametrize("steps", [[], ["run/checkpoints/0"]])
def test_a_tokenizer_that_is_not_that_of_the_checkpoint_is_refused(source, tmp_path, steps):
    directories.import_directory(str(source), str(tmp_path / "run"))
    vocabulary = tmp_path / "run" / "tokenizer" / "vocabulary.json"
    vocabulary.write_text(vocabulary.read_text().replace('"<mask>"', '"<other>"'))
    with pytest.raises(UserError, match=r"checkpoint .* was trained with tokenizer \w+, and .*/tokenizer is \w+"):
        directories.export_workdir(
            str(tmp_path / "run"), str(tmp_path / "out"), [str(tmp_path / step) for step in steps]
        )
    assert not (tmp_path / "out").exists()


def test_names_of_a_bare_and_old_file_are_understood(source, tmp_path):
    state = {}
    for name, x in stored(source).items():
        name = name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
        state[name.replace("LayerNorm.bias", "LayerNorm.beta")] = x
    safetensors.numpy.save_file(state, source / "model.safetensors")
    directories.import_directory(str(source), str(tmp_path / "run"))
    assert_same(params_of(tmp_path / "run", CASES["bert"].config), weights(CASES["bert"].config))


# --- a start for training --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("through", few(["directory", "workdir"], ["directory"]))
def test_training_goes_on_from_a_directory(through, tmp_path, text, cache):
    source = write_directory(tmp_path / "source", "gpt2")
    directories.import_directory(str(source), str(tmp_path / "run"))
    experiment = config_lib.load(tmp_path / "run" / "config.json")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.data.sequence_length, experiment.train.global_batch_size, experiment.train.steps = 16, 8, 2
    experiment.optimizer.learning_rate = 0.0
    experiment.optimizer.weight_decay = 0.0
    experiment.checkpoint.init_from = str(source if through == "directory" else tmp_path / "run")
    assert train(experiment, str(tmp_path / "more")) == 0
    assert_same(params_of(tmp_path / "more", experiment.model), weights(CASES["gpt2"].config))
    # The checkpoint that training saved can be exported too.
    directories.export_workdir(str(tmp_path / "more"), str(tmp_path / "out"))
    assert all(x.tobytes() == stored(tmp_path / "out")[key].tobytes() for key, x in stored(source).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["bert", "t5_1_1", "gemma2"], ["t5_1_1"]))
def test_an_imported_workdir_evaluates(name, tmp_path, text, cache):
    source = write_directory(tmp_path / "source", name)
    directories.import_directory(str(source), str(tmp_path / "run"))
    sizes = "--config.data.sequence_length=16", "--config.train.global_batch_size=8", "--config.evaluate.batches=1"
    where = f"--config.data.source=TextFiles(path='{text}')", f"--config.data.cache_dir={cache}"
    done = run(f"--workdir={tmp_path / 'run'}", *where, *sizes, module="evaluate")
    assert done.returncode == 0 and "perplexity" in done.stdout, done.stderr


def test_an_imported_workdir_is_not_resumed(tmp_path, text, cache):
    directories.import_directory(str(write_directory(tmp_path / "source", "gpt2")), str(tmp_path / "run"))
    experiment = config_lib.load(tmp_path / "run" / "config.json")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(cache)
    experiment.data.sequence_length, experiment.train.global_batch_size = 16, 8
    os.remove(tmp_path / "run" / "config.json")
    with pytest.raises(UserError, match="has only imported parameters.*--config.checkpoint.init_from="):
        train(experiment, str(tmp_path / "run"))


def test_a_model_that_transformers_has_not_is_not_exported(source, tmp_path):
    directories.import_directory(str(source), str(tmp_path / "run"))
    experiment = config_lib.load(tmp_path / "run" / "config.json")
    experiment.model.qk_norm = True
    (tmp_path / "run" / "config.json").write_text(config_lib.dump(experiment))
    with pytest.raises(UserError, match="no architecture of transformers computes this config.model.*qk_norm=True"):
        directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_words_is_refused_before_tensors_are_written(source, tmp_path, monkeypatch):
    directories.import_directory(str(source), str(tmp_path / "run"))
    monkeypatch.setattr(directories, "_write_tensors", lambda *_: pytest.fail("tensors are written"))
    words = Words(vocab_size=8).build(iter(["the cat sat on a mat"]))
    monkeypatch.setattr(directories, "load_tokenizer", lambda _: words)
    monkeypatch.setattr(directories, "check_tokenizer", lambda *_: None)
    with pytest.raises(UserError, match="^WordTokenizer has no tokenizer.json; use [^\n]*$"):
        directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run", "source"]


# --- the command -----------------------------------------------------------------------------------------------------


def run(*words, module="huggingface"):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST}
    command = [sys.executable, "-m", f"pretrainax.{module}", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_imports_and_exports(source, tmp_path):
    done = run("import", f"--from={source}", f"--workdir={tmp_path / 'run'}", "--noverify")
    assert done.returncode == 0 and "parameters imported" in done.stdout, done.stderr
    done = run("export", f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}", "--dtype=bfloat16", "--noverify")
    assert done.returncode == 0 and "as BertForPreTraining" in done.stdout, done.stderr
    assert {x.dtype.name for x in stored(tmp_path / "out").values()} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, message",
    [
        ((), "the first argument must be import or export or verify; got 'nothing'"),
        (("imprt",), "the first argument must be import or export or verify; got 'imprt'"),
        (("import",), "import needs --workdir=DIR"),
        (("export", "--workdir=nowhere", "--to=x"), "nowhere is no directory here"),
    ],
)
def test_a_bad_command_is_one_line(words, message):
    done = run(*words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr


def test_an_import_that_was_cut_short_is_one_line(source, tmp_path):
    directories.import_directory(str(source), str(tmp_path / "run"))
    (tmp_path / "run" / "config.json").unlink()  # the import writes this file last
    with pytest.raises(UserError, match="an import that was cut short"):
        directories.import_directory(str(source), str(tmp_path / "run"))


def test_a_full_disk_is_one_line(source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    directories.import_directory(str(source), str(tmp_path / "run"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunFailed, match="could not write --to=.*No space left on device"):
        directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run", "source"]
