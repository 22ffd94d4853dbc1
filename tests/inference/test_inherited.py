"""A model's generation_config.json gives the options that the user does not set, as transformers reads it."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.data.objectives import CausalLM
from pretrainax.inference.inherited import request_of
from pretrainax.inference.request import Sampling
from pretrainax.interop.generation import FIELDS, GenerationFile, read_generation_file
from tests.golden.case import needs_transformers


def model(path="m/generation_config.json", **fields):
    vocabulary = SimpleNamespace(size=20)
    file = GenerationFile(path, fields)
    experiment, tokenizer = SimpleNamespace(objective=CausalLM()), SimpleNamespace(vocabulary=vocabulary)
    return SimpleNamespace(experiment=experiment, generation=file, tokenizer=tokenizer, end_tokens=(2,))


CHAT = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 11]}  # from LLaMA 3
BART = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3, "max_length": 142}
NONE = "without effect in generation_config.json: "


@pytest.mark.parametrize(
    "fields, given, expected, notes",
    [
        ({}, {}, {}, []),
        ({"eos_token_id": 2, "use_cache": False, "num_beams": 1, "top_p": 1.0, "temperature": 1.0}, {}, {}, []),
        (
            CHAT,
            {},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 50},
            ["from generation_config.json: temperature 0.6, top_k 50 (default of transformers), top_p 0.9"],
        ),
        ({"do_sample": True}, {}, {"temperature": 1.0, "top_k": 50}, None),
        ({"do_sample": True, "top_k": 0}, {}, {"temperature": 1.0}, None),
        (CHAT, {"temperature": 0.0}, {}, [f"{NONE}top_k 50 (default of transformers), top_p 0.9"]),
        (CHAT, {"top_p": 0.5}, {"temperature": 0.6, "top_p": 0.5, "top_k": 50}, None),
        (CHAT, {"num_beams": 3}, {"num_beams": 3}, None),
        ({"temperature": 0.6, "top_p": 0.9}, {}, {}, [f"{NONE}top_p 0.9"]),  # greedy, because do_sample is not true
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, None),
        (BART, {}, BART | {"max_new_tokens": 142}, None),
        (
            BART,
            {"max_new_tokens": 9},
            {k: v for k, v in BART.items() if k != "max_length"} | {"max_new_tokens": 9},
            None,
        ),
        (
            BART,
            {"num_beams": 1},
            {"no_repeat_ngram_size": 3, "max_length": 142, "max_new_tokens": 142},
            [
                "from generation_config.json: max_length 142, no_repeat_ngram_size 3",
                f"{NONE}length_penalty 2.0, early_stopping True",
            ],
        ),
        (
            BART,
            {"temperature": 0.7},
            {"temperature": 0.7, "no_repeat_ngram_size": 3, "max_length": 142, "max_new_tokens": 142},
            None,
        ),
        ({"max_length": 9, "max_new_tokens": 5}, {}, {"max_new_tokens": 5}, None),
        ({}, {"stop": ["a"], "banned_sequences": [[1, 2]]}, {"stop": ("a",), "banned_sequences": ((1, 2),)}, None),
        ({}, {"temperature": np.float32(0.5), "seed": np.int64(3)}, {"temperature": 0.5, "seed": 3}, None),
        ({"min_new_tokens": 30}, {"max_new_tokens": 8}, {"min_new_tokens": 8, "max_new_tokens": 8}, None),
        ({"num_return_sequences": 3, "num_beams": 4}, {}, {"num_return": 3, "num_beams": 4}, None),
        ({"num_return_sequences": 3, "num_beams": 4}, {"num_beams": 2}, {"num_beams": 2}, None),
        ({"num_return_sequences": 3}, {}, {}, [f"{NONE}num_return_sequences 3"]),
        ({"stop_strings": "\n", "suppress_tokens": [5, 20]}, {}, {"stop": ("\n",), "banned_tokens": (5,)}, None),
        ({"bad_words_ids": [[2], [3], [4, 5], [6, 25]]}, {}, {"banned_sequences": ((3,), (4, 5))}, None),
        ({"bad_words_ids": [[25]], "suppress_tokens": []}, {}, {}, []),
        (
            {"begin_suppress_tokens": [7], "forced_bos_token_id": 3, "forced_eos_token_id": 2},
            {},
            {"banned_first_tokens": (7,), "forced_bos_token_id": 3, "forced_eos_token_id": (2,)},
            None,
        ),
        (
            {"chat_format": "chatml", "max_window_size": 6144},
            {},
            {},
            ["unknown in generation_config.json, without effect: chat_format, max_window_size"],
        ),
    ],
)
def test_options_are_the_users_or_else_those_of_the_file(fields, given, expected, notes):
    request = request_of(model(**fields), given)
    assert request.sampling == Sampling(**expected)
    assert notes is None or request.notes == notes


@pytest.mark.parametrize(
    "fields, given, message",
    [
        ({"guidance_scale": 1.5}, {}, r"guidance_scale is 1.5, which generation does not support: ignore it with --ig"),
        ({"encoder_no_repeat_ngram_size": 3}, {}, "encoder_no_repeat_ngram_size is 3, which generation does not"),
        ({"sequence_bias": [[[5], -1.0]]}, {}, "sequence_bias is .*--ignore=sequence_bias, in Python ignore="),
        ({"exponential_decay_length_penalty": [5, 1.1]}, {}, "exponential_decay_length_penalty is"),
        ({"penalty_alpha": 0.6, "top_k": 4}, {}, "penalty_alpha is 0.6"),
        ({"num_beam_groups": 2, "diversity_penalty": 0.5, "num_beams": 4}, {}, "diversity_penalty is 0.5"),
        ({"do_sample": True, "num_beams": 4}, {}, "do_sample is true and num_beams 4, but beam search does not sample"),
        ({"do_sample": "yes"}, {}, "do_sample is 'yes', it must be true or false"),
        ({"do_sample": True, "top_p": 1.5}, {}, "m/generation_config.json: top_p is 1.5, it must be above 0 and at"),
        ({"num_beams": "4"}, {}, "num_beams is '4', it must be a whole number from 1; ignore it with --ignore=num_b"),
        ({"suppress_tokens": [-1]}, {}, r"suppress_tokens is \(-1,\), it must be a tuple"),
        ({"bad_words_ids": [5]}, {}, r"bad_words_ids is \(5,\), it must be a tuple of tuples"),
        ({"stop_strings": [3]}, {}, "stop_strings is"),
        ({"early_stopping": "soon", "num_beams": 2}, {}, "early_stopping is 'soon', it must be True, False or 'never'"),
        ({"forced_bos_token_id": [1, 2]}, {}, "forced_bos_token_id is"),
        ({}, {"top_p": 2.0}, "^top_p is 2.0, it must be"),
        ({}, {"top_p": 0.5}, "top_p is 0.5 and temperature 0"),
    ],
)
def test_what_the_file_must_not_have_is_one_line(fields, given, message):
    with pytest.raises(UserError, match=message) as caught:
        request_of(model(**fields), given)
    assert "\n" not in str(caught.value)


def test_fields_can_be_ignored():
    assert request_of(model(**CHAT), {}, ["all"]) == (Sampling(), [])
    assert request_of(model(**CHAT), {}, ["top_k"]).sampling == Sampling(temperature=0.6, top_p=0.9)
    assert request_of(model(**CHAT), {}, ["do_sample"]).sampling == Sampling()
    assert request_of(model(guidance_scale=1.5, num_beams=2), {}, "guidance_scale").sampling == Sampling(num_beams=2)
    assert request_of(model(do_sample=True, num_beams=2), {}, ["num_beams"]).sampling.temperature == 1.0
    assert request_of(model(chat_format="a"), {}, ["chat_format"]).notes == []
    with pytest.raises(UserError, match="ignore has 'top_q', did you mean 'top_"):
        request_of(model(**CHAT), {}, ["top_q"])


@needs_transformers
def test_every_field_of_transformers_has_a_meaning():
    from transformers import GenerationConfig

    assert set(vars(GenerationConfig())) - set(FIELDS) <= {"_original_object_hash"}


VALUES = {
    **{"do_sample": [True, False, None], "temperature": [0.6, 1.0, None], "top_k": [5, 0], "num_beams": [1, 4, None]},
    **{"early_stopping": [True, False, "never"], "length_penalty": [2.0, 1], "no_repeat_ngram_size": [0, 3]},
    **{"max_length": [20, 142], "min_length": [0, 12], "max_new_tokens": [9, None], "forced_bos_token_id": [0, 5]},
    **{"forced_eos_token_id": [2, [2], None], "bad_words_ids": [[[3]], None], "suppress_tokens": [[4, 5], []]},
    **{"repetition_penalty": [1.0, 1.2], "top_p": [0.9, 1.0], "stop_strings": ["a", ["b"]], "bos_token_id": [1, None]},
}


@needs_transformers
def test_files_are_read_as_transformers_reads_them(tmp_path):
    """Tests 300 directories: one file or both; nested configs; nulls; the old name of forced_bos_token_id."""
    from transformers import GenerationConfig

    rng = random.Random(0)
    some = lambda n: {key: rng.choice(VALUES[key]) for key in rng.sample(sorted(VALUES), rng.randint(0, n))}  # noqa: E731
    for number in range(300):
        directory = tmp_path / str(number)
        directory.mkdir()
        config = {"model_type": "bart", **some(8)}
        if rng.random() < 0.4:
            config[rng.choice(["decoder", "text_config", "generator"])] = some(8)
        if rng.random() < 0.2:
            config["force_bos_token_to_be_generated"] = True
        (directory / "config.json").write_text(json.dumps(config))
        options = {"config_file_name": "config.json", "_from_model_config": True}
        if rng.random() < 0.4:
            options = {}
            (directory / "generation_config.json").write_text(json.dumps(some(12)))
        try:
            theirs = GenerationConfig.from_pretrained(str(directory), **options)
        except ValueError:  # num_return_sequences, or a forced token that is suppressed
            continue
        ours = read_generation_file(str(directory))
        expected = {name: value for name in VALUES if (value := getattr(theirs, name)) is not None}
        assert {k: v for k, v in ours.fields.items() if k in VALUES} == expected, number


def test_a_workdir_has_the_files_of_its_import(tmp_path):
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"model": {}, "num_beams": 9}))
    (tmp_path / "huggingface" / "config.json").write_text(json.dumps({"num_beams": 4, "vocab_size": 5}))
    assert read_generation_file(str(tmp_path)).fields == {"num_beams": 4}
    assert read_generation_file(str(tmp_path / "missing")) is None
