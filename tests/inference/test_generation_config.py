"""A directory's generation_config.json has the same effect as in transformers: equal ids from the same files."""

import dataclasses
import json
import random

import jax
import numpy as np
import pytest

import pretrainax
from pretrainax.data.batch import is_encoder_decoder
from pretrainax.inference.prompts import read_prompt
from pretrainax.interop.generation import end_tokens, read_generation_file
from tests.golden import CASES
from tests.golden.case import needs_transformers
from tests.support.huggingface_weights import write_directory

pytestmark = needs_transformers

CONTEXT, LIMIT = 64, 14
PROMPTS = "the cat sat, and the cat sat", "a", "no dog. i say no more"
SUMMARIES = {  # from BART-large-cnn
    **{"num_beams": 4, "no_repeat_ngram_size": 3, "early_stopping": True, "length_penalty": 2.0},
    **{"min_length": 6, "max_length": 15, "forced_bos_token_id": 0, "forced_eos_token_id": 2},
}
TRANSLATIONS = {  # from OPUS-MT
    **{"num_beams": 3, "bad_words_ids": [[9], [10, 11]], "renormalize_logits": True, "max_length": 12},
    "forced_eos_token_id": 2,
}
FAST = [
    ("bart", SUMMARIES),
    ("t5_1_1", TRANSLATIONS),
    ("gpt2", {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "max_new_tokens": LIMIT}),
    (
        "gpt2",
        {"num_beams": 3, "no_repeat_ngram_size": 2, "early_stopping": "never", "max_length": 40, "min_length": 30},
    ),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Limits torch to one thread: with matrices this small, several threads on a busy machine wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def directory_of(tmp_path, name, settings, file="generation_config.json"):
    """Writes a directory of a tiny model with `settings` in one of its files."""
    case = CASES[name]
    position = case.config.position
    if getattr(position, "max_length", None) is not None:
        position = dataclasses.replace(position, max_length=CONTEXT)
    case = case._replace(config=dataclasses.replace(case.config, position=position))
    directory = write_directory(tmp_path / "model", case)
    config = json.loads((directory / "config.json").read_text())
    ids = {key: value for key, value in config.items() if key.endswith("_token_id") and value is not None}
    ids |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    ids |= {"decoder_start_token_id": 2} if case.config.family == "encoder_decoder" else {}
    (directory / "config.json").write_text(json.dumps(config | ids))
    merged = (config | ids if file == "config.json" else ids) | settings
    (directory / file).write_text(json.dumps(merged))
    return directory


def with_padding_suppressed(directory, file="generation_config.json"):
    """Suppresses the output ids that the tokenizer does not have; our generation never produces them."""
    config = json.loads((directory / "config.json").read_text())
    size = len(json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"])
    content = json.loads((directory / file).read_text())
    content["suppress_tokens"] = [*(content.get("suppress_tokens") or []), *range(size, config["vocab_size"])]
    (directory / file).write_text(json.dumps(content))
    return directory


def reference(directory):
    """Loads the model and the tokenizer with transformers."""
    import transformers

    config = json.loads((directory / "config.json").read_text())
    kinds = transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM
    model = kinds[bool(config.get("is_encoder_decoder"))].from_pretrained(directory, attn_implementation="eager")
    return model.eval(), transformers.AutoTokenizer.from_pretrained(directory)


def theirs(model, tokenizer, loaded, **given):
    """Returns the ids that transformers generates after each prompt."""
    import torch

    rows = []
    for prompt in PROMPTS:
        example = read_prompt(prompt, loaded.experiment, loaded.tokenizer)
        two = is_encoder_decoder(example)
        ids = torch.from_numpy(example["encoder_tokens" if two else "tokens"].astype(np.int64))[None]
        with torch.no_grad():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), tokenizer=tokenizer, **given)
        rows += [row[1 if two else ids.shape[1] :] for row in found.tolist()]
    return rows


def assert_same(texts, rows, ends):
    """Compares generated ids with rows of transformers, which have padding or end tokens after the end of a text."""
    assert len(texts) == len(rows)
    for text, row in zip(texts, rows, strict=True):
        ids = list(text.ids)
        if text.ended == "stop":
            assert ids == row[: len(ids)] and set(row[len(ids) :]) <= {0, *ends}
        else:
            first = next((i for i, token in enumerate(row) if token in ends), len(row))
            assert ids == row[: first + 1]


def compare(directory, theirs_given=None, **given):
    loaded = pretrainax.load(str(directory))
    with jax.default_matmul_precision("highest"):
        texts = loaded.generate(PROMPTS, **given)
    rows = theirs(*reference(directory), loaded, **(given if theirs_given is None else theirs_given))
    assert_same(texts, rows, loaded.end_tokens)
    return texts


@pytest.mark.first(1)
@pytest.mark.parametrize("name, settings", FAST)
def test_settings_of_the_file_apply_as_in_transformers(name, settings, tmp_path, capsys):
    compare(with_padding_suppressed(directory_of(tmp_path, name, settings)))
    assert "from generation_config.json: " in capsys.readouterr().err


@pytest.mark.first(1)
@pytest.mark.parametrize("name, settings", [FAST[0], ("gpt2", {"no_repeat_ngram_size": 2, "max_length": 40})])
def test_settings_of_config_json_apply_without_the_other_file(name, settings, tmp_path):
    directory = with_padding_suppressed(directory_of(tmp_path, name, settings, "config.json"), "config.json")
    plain, _ = (text.ids for text in pretrainax.load(str(directory)).generate(PROMPTS[:2], ignore="all"))
    assert compare(directory)[0].ids != plain


@pytest.mark.slow
def test_flags_come_before_the_file(tmp_path):
    directory = with_padding_suppressed(directory_of(tmp_path, "bart", SUMMARIES))
    changed = {"num_beams": 2, "length_penalty": -1.0, "no_repeat_ngram_size": 2}
    compare(directory, max_new_tokens=9, **changed)
    compare(directory, num_beams=1, max_length=7)
    compare(directory, theirs_given={"num_return_sequences": 3}, num_return=3)
    compare(directory, {"forced_bos_token_id": None}, ignore=("forced_bos_token_id",))


def random_settings(rng, name, words):
    """Returns valid random settings of generation_config.json; most of them are set with a probability of 0.4."""
    two = name not in ("gpt2", "llama3")
    ids = lambda low, high: [rng.randrange(3, 36) for _ in range(rng.randint(low, high))]  # noqa: E731
    maybe = lambda key, value: {key: value} if rng.random() < 0.4 else {}  # noqa: E731
    beams = rng.choice([1, 1, 2, 3, 5])
    most = rng.randint(3, LIMIT)
    settings = {"num_beams": beams}
    settings |= {"max_new_tokens": most} if rng.random() < 0.5 else {"max_length": most + (1 if two else 28)}
    settings |= maybe("eos_token_id", [2, *ids(1, 2)])
    settings |= maybe("no_repeat_ngram_size", rng.randint(1 if two else 2, 4))
    settings |= maybe("repetition_penalty", rng.choice([1.2, 0.7, 1.0]))
    settings |= maybe("bad_words_ids", [ids(1, 3) for _ in range(rng.randint(1, 4))] + rng.choice([[], [[2]]]))
    settings |= maybe("suppress_tokens", ids(1, 5)) | maybe("begin_suppress_tokens", ids(1, 12))
    settings |= maybe("forced_bos_token_id", rng.choice([0, 1])) | maybe("forced_eos_token_id", rng.choice([2, [2]]))
    settings |= rng.choice([{}, {}, {"min_length": rng.randint(0, 34)}, {"min_new_tokens": rng.randint(0, most)}])
    settings |= maybe("stop_strings", rng.sample(words, rng.randint(1, 3)))
    if beams > 1:
        settings |= rng.choice([{}, *({"early_stopping": value} for value in (True, False, "never"))])
        settings |= maybe("length_penalty", rng.choice([0.0, 2.0, -1.0, 0.5]))
        settings |= maybe("renormalize_logits", True) | maybe("num_return_sequences", rng.randint(2, beams))
    return settings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", "t5_1_1", "gpt2", "llama3"])
def test_random_settings_apply_as_in_transformers(name, tmp_path):
    """Tests 24 settings for three prompts each, including every early_stopping value, and stop strings with beams."""
    import transformers

    directory = directory_of(tmp_path, name, {})
    path, given = directory / "generation_config.json", json.loads((directory / "generation_config.json").read_text())
    model, tokenizer = reference(directory)
    first = pretrainax.load(str(directory))
    banned = ("<s>",)  # BART's most likely token with these weights; it is not part of a text
    texts = first.generate(PROMPTS, max_new_tokens=LIMIT, banned_tokens=banned if name == "bart" else ())
    words = [text.text[i : i + n] for text in texts for i in range(6) for n in (1, 2, 3)]
    words = [word for word in words if word.strip() and "<" not in word]  # a forced <s> would end each text at once
    words = [
        word for word in words if word not in "<s>"
    ]  # transformers also finds these in BART's <s>, which is not part of a text
    rng, num_stopped = random.Random(name), 0
    for number in range(24):
        settings = random_settings(rng, name, words)
        path.write_text(json.dumps(given | settings))
        with_padding_suppressed(directory)
        file, ends = read_generation_file(str(directory)), end_tokens(str(directory), first.config.vocab_size)
        loaded = dataclasses.replace(first, generation=file, ends=ends)
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
        with jax.default_matmul_precision("highest"):
            texts = loaded.generate(PROMPTS)
        try:
            assert_same(texts, theirs(model, tokenizer, loaded), loaded.end_tokens)
        except AssertionError as e:
            raise AssertionError(f"{number}: {settings}") from e
        num_stopped += sum(text.ended == "stop" for text in texts)
    assert num_stopped >= 3 or name == "bart"  # the most likely token of BART is <s>
