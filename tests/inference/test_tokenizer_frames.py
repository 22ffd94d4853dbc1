"""Prompts, embeddings, masks, scores and tasks use the special tokens that the tokenizer itself adds."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from pretrainax import config as config_lib
from pretrainax import models
from pretrainax.data.batch import is_encoder_decoder
from pretrainax.data.leading_tokens import leading_token_ids
from pretrainax.data.objectives import CausalLM, MaskedLM, NextSentencePrediction, ObjectiveInput
from pretrainax.data.sources import TextFiles
from pretrainax.inference.framing import frame_of, framed_rows
from pretrainax.inference.load import load
from pretrainax.inference.prompts import read_prompt
from pretrainax.interop import directories
from pretrainax.scoring.likelihood import score
from pretrainax.scoring.scoring_examples import Scoring, method_of
from pretrainax.tasks import Classification, TextGeneration
from pretrainax.tokenization import BPE, ByteBPE
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame, post_processor
from tests.golden import CASES
from tests.golden.case import needs_transformers
from tests.support.exports import write_run
from tests.support.huggingface_directories import auto, lines
from tests.support.huggingface_weights import write_directory, write_tokenizer

BOS, EOS, MASK, CLS, SEP = 0, 1, 3, 4, 5  # ids of the tokenizer of `write_tokenizer` with padding 98
PIECES = {BOS: "<s>", EOS: "</s>", CLS: "[CLS]", SEP: "[SEP]"}
FRAMES = {
    "nothing": SpecialTokenFrame(RowFrame(), RowFrame()),
    "bos": SpecialTokenFrame(RowFrame((BOS,)), RowFrame((BOS,), (BOS,))),
    "eos": SpecialTokenFrame(RowFrame((), (), (EOS,)), RowFrame((), (EOS,), (EOS,))),
    "bos and eos": SpecialTokenFrame(RowFrame((BOS,), (), (EOS,)), RowFrame((BOS,), (EOS, EOS), (EOS,), (0,) * 6)),
    "cls and sep": SpecialTokenFrame(RowFrame((CLS,), (), (SEP,)), RowFrame((CLS,), (SEP,), (SEP,))),
}
TEXT = "the cat"


def write_model(directory, name, kind, without=("cls_token", "sep_token")):
    """Writes the model of a case; its tokenizer adds `FRAMES[kind]`, and names bos and eos but neither cls nor sep."""
    write_directory(directory, name)
    write_tokenizer(directory, pad_id=98, sentinels=10)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config = {key: value for key, value in config.items() if key not in without}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    file = directory / "tokenizer.json"
    template = None if kind == "nothing" else post_processor(FRAMES[kind], PIECES)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": template}))
    return directory


def tokens(example):
    return example["encoder_tokens" if is_encoder_decoder(example) else "tokens"].tolist()


@pytest.mark.parametrize("kind", FRAMES)
def test_prompts_are_those_of_transformers(kind, tmp_path):
    for name in ("llama3", "t5_1_1", "bart"):
        loaded = load(str(write_model(tmp_path / name, name, kind)))
        expected = auto(tmp_path / name)(TEXT).input_ids
        assert tokens(read_prompt(TEXT, loaded.experiment, loaded.tokenizer)) == expected
        assert framed_rows(loaded, [TEXT])[0].tolist() == expected  # the rows of embeddings


@pytest.mark.parametrize("kind", FRAMES)
def test_rows_of_an_encoder_are_those_of_transformers(kind, tmp_path):
    loaded = load(str(write_model(tmp_path / "bert", "bert_masked_lm", kind)))
    vocabulary, tokenizer = loaded.tokenizer.vocabulary, auto(tmp_path / "bert")
    expected, ids = tokenizer(TEXT).input_ids, loaded.tokenizer.encode(TEXT)
    assert framed_rows(loaded, [TEXT])[0].tolist() == expected
    (before, after), text = frame_of(loaded), ObjectiveInput(ids, np.ones_like(ids))
    objective = MaskedLM().bind(loaded.tokenizer)
    example = objective.example(text, np.random.default_rng(0), vocabulary)
    assert len(example["tokens"]) == len(expected) == objective.measure(len(ids)).inputs
    np.testing.assert_array_equal(objective.restore(example, vocabulary), ids)
    assert example["tokens"][: len(before)].tolist() == [*before]
    scored = [x["tokens"].tolist() for x in method_of(loaded, Scoring()).examples_for(TEXT).examples]
    masked = [[*before, *ids[:i], MASK, *ids[i + 1 :], *after] for i in range(len(ids))]
    assert scored == masked


@pytest.mark.parametrize("kind", [kind for kind in FRAMES if kind != "nothing"])
def test_pairs_of_training_and_of_tasks_are_those_of_transformers(kind, tmp_path):
    loaded = load(str(write_model(tmp_path / "bert", "bert_masked_lm", kind)))
    vocabulary = loaded.tokenizer.vocabulary
    expected = auto(tmp_path / "bert")("ab", "c", return_token_type_ids=True)
    a, b = loaded.tokenizer.encode_batch(["ab", "c"])
    task = Classification(labels=("x", "y"), pair_field="other").adapted(loaded.experiment).bind(loaded.tokenizer)
    row = task.framed([a, b], vocabulary)
    assert row["tokens"].tolist() == expected.input_ids
    types = loaded.experiment.model.num_token_types
    assert row["token_types"].tolist() == np.minimum(expected.token_type_ids, max(types - 1, 0)).tolist()
    objective = NextSentencePrediction(short_fraction=0.0).bind(loaded.tokenizer)
    text = ObjectiveInput(np.concatenate([a, b]), np.ones(3, np.int32), np.array([2, 3]))
    text = text._replace(draw_other_document=lambda rng: text)
    example = objective.example(text, np.random.default_rng(0), vocabulary)
    first, second = objective.segments(example)
    frame = FRAMES[kind].pair
    row = example["tokens"].copy()
    row[example["masked_positions"]] = example["targets"]
    assert row.tolist() == [*frame.before, *first, *frame.between, *second, *frame.after]
    assert len(row) <= objective.measure(3).inputs


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("name", ["t5_1_1", "llama3"])
def test_answers_always_end(name, kind, tmp_path):
    """A model learns to end its answers even if the tokenizer does not add the end token."""
    loaded = load(str(write_model(tmp_path / name, name, kind)))
    task = TextGeneration().adapted(loaded.experiment).bind(loaded.tokenizer)
    source, target = loaded.tokenizer.encode_batch(["ab", "c"])
    text = ObjectiveInput(np.concatenate([source, target]), np.ones(3, np.int32), np.array([2, 3]), note={"tail": 0})
    example = task.example(text, np.random.default_rng(0), loaded.tokenizer.vocabulary)
    assert example["targets"][-1] == EOS
    assert len(example["targets"]) <= task.measure(3).targets
    prompt = task.prompt_example(text, loaded.tokenizer.vocabulary)
    assert tokens(prompt) == tokens(example)[: len(tokens(prompt))]


@pytest.mark.first(1)
@needs_transformers
@pytest.mark.parametrize("kind", ["nothing", "bos", "bos and eos"])
def test_bits_per_byte_and_texts_are_those_of_transformers(kind, tmp_path):
    """Each token is predicted from the tokens that the tokenizer adds, or from <s> if it adds none."""
    import torch
    import transformers

    directory = write_model(tmp_path / "llama", "llama3", kind)
    loaded, model = load(str(directory)), transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = loaded.tokenizer.encode(TEXT).tolist()
    before = [*FRAMES[kind].single.before] or [BOS]
    assert leading_token_ids(loaded.experiment, loaded.tokenizer.vocabulary, is_needed=True) == before
    with torch.no_grad():
        logits = model(torch.tensor([before + ids])).logits[0].log_softmax(-1)
        expected = -sum(float(logits[len(before) - 1 + i, token]) for i, token in enumerate(ids))
        prompt = auto(directory)(TEXT, return_tensors="pt")
        written = model.generate(**prompt, max_new_tokens=5, do_sample=False, eos_token_id=EOS, pad_token_id=98)
    (scored,) = score(loaded, [TEXT])
    assert scored.nats == pytest.approx(expected, rel=1e-4) and scored.bytes == len(TEXT)
    (ours,) = loaded.generate([TEXT], max_new_tokens=5)
    assert list(ours.ids) == written[0, prompt.input_ids.shape[1] :].tolist()


def test_an_import_of_an_older_version_keeps_its_prompts(tmp_path):
    """The workdir of such an import records no frame, so the names of the special tokens decide, as before."""
    directories.import_directory(str(write_model(tmp_path / "x", "llama3", "nothing")), str(tmp_path / "run"))
    loaded = load(str(tmp_path / "run"))
    ids = loaded.tokenizer.encode(TEXT).tolist()
    assert tokens(read_prompt(TEXT, loaded.experiment, loaded.tokenizer)) == ids
    file = tmp_path / "run" / "tokenizer" / "vocabulary.json"
    described = json.loads(file.read_text())
    del described["vocabulary"]["frame"]
    file.write_text(json.dumps(described))
    loaded = load(str(tmp_path / "run"))
    assert tokens(read_prompt(TEXT, loaded.experiment, loaded.tokenizer)) == [BOS, *ids]
    assert CASES["llama3"].config.family == "decoder"


@pytest.mark.parametrize(
    "kind, objective, reads",
    [
        (BPE(vocab_size=400), CausalLM(), ["</s>"]),
        (ByteBPE(vocab_size=400), CausalLM(), ["<|endoftext|>"]),
        (ByteBPE(vocab_size=400, special_pieces="roberta"), CausalLM(), ["</s>"]),
        (BPE(vocab_size=400), CausalLM(mask_documents=True), []),
        (BPE(vocab_size=400), TextGeneration(), ["<s>"]),
    ],
    ids=["llama", "gpt2", "roberta", "documents apart", "answers"],
)
def test_an_export_of_a_trained_decoder_reads_what_the_run_reads(kind, objective, reads, tmp_path):
    tokenizer = kind.build(iter(lines()))
    config = dataclasses.replace(CASES["llama3"].config, vocab_size=tokenizer.vocabulary.size)
    (tmp_path / "run").mkdir()
    params = jax.tree.map(
        lambda x: np.random.default_rng(0).normal(0, 0.2, x.shape).astype("f4"), models.abstract_params(config)
    )
    write_run(tmp_path / "run", config, params, tokenizer)
    experiment = config_lib.load(tmp_path / "run" / "config.json")
    experiment.data.source, experiment.objective = TextFiles(path="x"), objective
    (tmp_path / "run" / "config.json").write_text(config_lib.dump(experiment))
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    run, export = load(str(tmp_path / "run")), load(str(tmp_path / "out"))
    row = read_prompt("sa ke", run.experiment, tokenizer)["tokens"].tolist()
    assert [tokenizer.special_pieces[i] for i in row[: len(reads)]] == reads
    assert row[len(reads) :] == tokenizer.encode("sa ke").tolist()
    assert read_prompt("sa ke", export.experiment, export.tokenizer)["tokens"].tolist() == row
    assert auto(tmp_path / "out")("sa ke").input_ids == row
    if reads:
        assert export.score(["sa ke"]) == run.score(["sa ke"])
