"""Encoder-decoders start from the token that their directory names, as in transformers, also after an export."""

import json

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.objectives import Denoising, ObjectiveInput, SequenceToSequence, SpanCorruption
from pretrainax.inference.load import load
from pretrainax.interop import directories
from pretrainax.tokenization.huggingface import read_tokenizer
from tests.golden.case import needs_transformers
from tests.support.huggingface_weights import write_directory, write_tokenizer

PROMPTS, LENGTH = ("the cat sat", "a"), 6
NO_IDS = {"decoder_start_token_id": None, "bos_token_id": None, "forced_eos_token_id": None, "eos_token_id": 1}
# Fields of generation_config.json (None: no such file) and config.json -> the start token of transformers.
STARTS = {
    "both": ({"decoder_start_token_id": 7}, {"decoder_start_token_id": 5}, 7),
    "config alone": (None, {"decoder_start_token_id": 5}, 5),
    "generation alone": ({"decoder_start_token_id": 8}, {}, 8),
    "bos of generation": ({"bos_token_id": 6}, {"decoder_start_token_id": 5}, 6),
    "bos of config": (None, {"bos_token_id": 9}, 9),
    "zero": ({"decoder_start_token_id": 0}, {"bos_token_id": 9}, 0),
}


def changed(file, **fields):
    """Sets fields of a JSON file; None removes a field."""
    fields = (json.loads(file.read_text()) if file.exists() else {}) | fields
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def write_model(directory, name, generation=None, config=None, without=()):
    write_directory(directory, name)
    write_tokenizer(directory, pad_id=98, sentinels=10)  # with a piece for each row of the embedding
    changed(directory / "config.json", **NO_IDS | {"pad_token_id": 98} | (config or {}))
    if generation is not None:
        ends = {"eos_token_id": 1, "pad_token_id": 98}
        changed(directory / "generation_config.json", **ends | generation)
    if without:
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        settings = {key: value for key, value in settings.items() if key not in without}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def ours(source):
    return [list(text.ids) for text in load(str(source)).generate(PROMPTS, max_new_tokens=LENGTH)]


def theirs(directory):
    """Returns the start token and the output of transformers' generate()."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory)
    rows = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            rows.append(model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False, num_beams=1)[0].tolist())
    return rows[0][0], [row[1:] for row in rows]


def assert_as_transformers(directory, workdir, out, start):
    expected = theirs(directory)
    assert expected[0] == start
    assert ours(directory) == expected[1]
    directories.import_directory(str(directory), str(workdir))
    assert ours(workdir) == expected[1]
    directories.export_workdir(str(workdir), str(out))
    assert theirs(out) == expected
    assert ours(out) == expected[1]
    return json.loads((out / "config.json").read_text()), json.loads((out / "generation_config.json").read_text())


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("case", STARTS)
@pytest.mark.parametrize("name", ["t5_1_1", "mt5", "bart", "t5gemma_9b_2b", "transformer", "switch"])
def test_texts_start_as_in_transformers(name, case, tmp_path):
    generation, config, start = STARTS[case]
    directory = write_model(tmp_path / "source", name, generation, config)
    config, generation = assert_as_transformers(directory, tmp_path / "run", tmp_path / "out", start)
    assert generation["decoder_start_token_id"] == start
    assert config["decoder_start_token_id"] == STARTS[case][1].get("decoder_start_token_id", start)


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("name, case", [("t5gemma_9b_2b", "bos of generation"), ("bart", "both")])
def test_a_text_starts_as_in_transformers(name, case, tmp_path):
    generation, config, start = STARTS[case]
    directory = write_model(tmp_path / "source", name, generation, config)
    assert_as_transformers(directory, tmp_path / "run", tmp_path / "out", start)


@pytest.mark.slow
@needs_transformers
def test_t5gemma_starts_from_the_bos_of_its_decoder(tmp_path):
    directory = write_model(tmp_path / "source", "t5gemma_9b_2b")
    config = json.loads((directory / "config.json").read_text())
    config["decoder"]["bos_token_id"] = 4
    (directory / "config.json").write_text(json.dumps(config))
    assert_as_transformers(directory, tmp_path / "run", tmp_path / "out", 4)


@pytest.mark.slow
@needs_transformers
def test_a_bart_without_a_mask_starts_where_it_should(tmp_path):
    directory = write_model(tmp_path / "source", "bart", {"decoder_start_token_id": 1}, None, ["mask_token"])
    assert isinstance(load(str(directory)).experiment.objective, SpanCorruption)  # the config looks like one of a T5
    assert_as_transformers(directory, tmp_path / "run", tmp_path / "out", 1)


@pytest.mark.parametrize("objective", [SpanCorruption(), SequenceToSequence(), Denoising(permutation_rate=0.0)])
def test_training_starts_from_it_too(objective, tmp_path):
    vocabulary = read_tokenizer(str(write_model(tmp_path / "x", "bart", {"decoder_start_token_id": 5}))).vocabulary
    text = ObjectiveInput(np.arange(10, 20, dtype=np.int32), np.ones(10, np.int32), np.array([4, 10]))
    for example in (
        objective.example(text, np.random.default_rng(0), vocabulary),
        objective.prompt(text.tokens, vocabulary),
    ):
        assert example["tokens"][0] == 5


def test_a_directory_without_a_start_leaves_it_to_the_objective(tmp_path):
    assert read_tokenizer(str(write_model(tmp_path / "x", "bart"))).vocabulary.decoder_start is None
    decoder = write_model(tmp_path / "y", "gpt2", config={"bos_token_id": 3})
    assert read_tokenizer(str(decoder)).vocabulary.decoder_start is None


@pytest.mark.parametrize("start", ["</s>", [5, 6], -1, 2.0, True, {}])
def test_a_start_that_is_no_id_is_one_line(start, tmp_path):
    directory = write_model(tmp_path / "x", "bart", {"decoder_start_token_id": start})
    with pytest.raises(UserError, match="generation_config.json: decoder_start_token_id is .*must be the id"):
        read_tokenizer(str(directory))


def test_a_start_outside_the_model_is_one_line(tmp_path):
    directory = write_model(tmp_path / "x", "bart", {"decoder_start_token_id": 99})
    with pytest.raises(UserError, match="is 99, and the model has only 99 rows of embeddings"):
        load(str(directory))
