"""Compares the model inputs and chat templates of the harness with transformers."""

import contextlib
import dataclasses
import json

import pytest

from pretrainax.config import UserError
from pretrainax.inference.load import load
from pretrainax.scoring.tasks.harness_inputs import HarnessInputs
from pretrainax.tokenization.huggingface import read_tokenizer
from tests.golden.case import needs_transformers
from tests.support.huggingface_weights import write_directory, write_tokenizer

TURNS = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
TURNS = "{{ bos_token }}" + TURNS + "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
TEMPLATES = {
    "plain": TURNS,
    "strips": TURNS.replace("m.content }}", "m.content | trim }}"),
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS,
    "marks": TURNS.replace("{{ eos_token }}", "{% generation %}{{ eos_token }}{% endgeneration %}"),
    "date": "{{ strftime_now('%Y') }}" + TURNS,
    "tools": "{% if tools is not none or documents is not none %}{{ tools[0] }}{% endif %}" + TURNS,
}
CHATS = {
    "user": [{"role": "user", "content": "a cat "}],
    "system": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "a cat"}],
    "begun": [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "sat on a "}],
    "begun twice": [{"role": "user", "content": "so"}, {"role": "assistant", "content": "so"}],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = write_directory(tmp_path_factory.mktemp("hf") / "model", "llama2")
    write_tokenizer(folder, pad_id=98, template="decoder")  # Adds <s> before a text.
    return folder


@pytest.fixture(scope="module")
def loaded(directory):
    return load(directory)


@contextlib.contextmanager
def settings(directory, name="tokenizer_config.json", **fields):
    """Sets fields of a JSON file within the context."""
    file = directory / name
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | fields))
    try:
        yield
    finally:
        file.write_text(before)


@needs_transformers
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_conversations_are_rendered_as_by_transformers(template, chat, directory, loaded):
    import transformers

    continues, messages = chat.startswith("begun"), CHATS[chat]
    with settings(directory, chat_template=TEMPLATES[template]):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        inputs = HarnessInputs(loaded)
        text = inputs.render_chat(messages, continues)
    if template == "no system":  # `hf` omits messages that the template does not support
        messages = [message for message in messages if message["role"] != "system"]
    options = {"add_generation_prompt": not continues, "continue_final_message": continues}
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, **options)
    # The text has one <s>, although the tokenizer adds another one to other text.
    assert inputs.encode(text).count(0) == 1 or template == "date"
    assert inputs.encode(text, False) == tokenizer.encode(text, add_special_tokens=False)


def test_a_template_is_selected_by_name(directory, loaded):
    named = [{"name": name, "template": name} for name in ("default", "tool_use")]
    with settings(directory, chat_template=named):
        inputs = HarnessInputs(loaded)
        for name, found in ((True, "default"), ("tool_use", "tool_use")):
            assert inputs.select_template(name) == inputs.render_chat(CHATS["user"], False) == found
        with pytest.raises(UserError, match="has no chat template 'tools', .*tool_use"):
            inputs.select_template("tools")


def test_a_single_template_has_every_name(directory, loaded):
    with settings(directory, chat_template="x"):
        assert HarnessInputs(loaded).select_template("tool_use") == "x"


def test_prompts_are_cached_by_template(directory, loaded):
    with settings(directory, chat_template="x"):
        first = HarnessInputs(loaded).fingerprint
    assert first != HarnessInputs(loaded).fingerprint


def test_a_model_without_a_template_is_one_line(loaded):
    with pytest.raises(UserError, match=r"model has no chat template \(chat_template.jinja, or .*\): add one"):
        HarnessInputs(loaded).render_chat(CHATS["user"], False)


def test_a_template_that_changes_the_begun_answer_is_one_line(directory, loaded):
    with settings(directory, chat_template="{{ messages[0].content }}"):
        inputs = HarnessInputs(loaded)
        with pytest.raises(UserError, match="the chat template of .* changes the final message.*'sat on a '"):
            inputs.render_chat(CHATS["begun"], True)


@needs_transformers
@pytest.mark.parametrize("text", ["a .,cat", "a . cat,", "so<s> it</s>is"])
def test_ids_are_decoded_as_by_transformers(text, directory, loaded):
    import transformers

    with settings(directory, clean_up_tokenization_spaces=True):
        tokenizer, inputs = transformers.AutoTokenizer.from_pretrained(directory), HarnessInputs(loaded)
        ids = inputs.encode(text, False)
        kept = ids[: ids.index(1)] if 1 in ids else ids
        assert inputs.decode(ids, []) == tokenizer.decode(kept, skip_special_tokens=True)


def test_a_text_is_encoded_whole_whatever_length_the_tokenizer_file_stores(directory, loaded):
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 98}
    padding |= {"pad_type_id": 0, "pad_token": "<pad>"}
    with settings(directory, "tokenizer.json", truncation=truncation, padding=padding):
        stored = HarnessInputs(dataclasses.replace(loaded, tokenizer=read_tokenizer(str(directory))))
    ids = stored.encode("a cat sat on a mat")
    assert len(ids) == 19 and ids == HarnessInputs(loaded).encode("a cat sat on a mat")


def test_a_text_ends_at_the_first_stop_string(loaded):
    inputs = HarnessInputs(loaded)
    assert inputs.decode(inputs.encode("a cat sat", False), ["sat", " c", ""]) == "a"


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = write_directory(tmp_path_factory.mktemp("hf") / "model", "t5_1_1")
    return folder, load(folder)


@pytest.mark.parametrize(
    "config, tokenizer, length",
    [
        ({"n_positions": 30}, {"model_max_length": 40}, 30),
        ({}, {"model_max_length": 40}, 40),
        ({}, {"model_max_length": int(1e30)}, 2048),
        ({}, {}, 2048),
    ],
)
def test_an_encoder_decoder_without_a_limit_reads_as_many_tokens_as_in_the_harness(config, tokenizer, length, t5):
    directory, model = t5
    with settings(directory, "config.json", **config), settings(directory, **tokenizer):
        assert HarnessInputs(model).max_length == length
        models = pytest.importorskip("lm_eval.models.utils", reason="lm_eval is not installed")
        transformers = pytest.importorskip("transformers")
        theirs = (kind.from_pretrained(directory) for kind in (transformers.AutoConfig, transformers.AutoTokenizer))
        assert models.resolve_max_length(*theirs) == length


@pytest.mark.parametrize("max_length", [0, 21, "20", True])
def test_a_length_that_cannot_be_is_one_line(max_length, loaded):
    with pytest.raises(UserError, match=f"max_length is {max_length!r}, it must be a whole number from 1 to 20"):
        HarnessInputs(loaded, max_length)


@pytest.mark.parametrize("continuation", [[], [9] * 21])
def test_a_continuation_that_cannot_be_is_one_line(continuation, loaded):
    with pytest.raises(UserError, match=f"a continuation has {len(continuation)} tokens, it must have 1 to 20"):
        HarnessInputs(loaded).example([9], continuation)


def test_an_encoder_decoder_reads_the_context_and_predicts_the_continuation(t5):
    example = HarnessInputs(t5[1]).example([9, 2], [10, 11])
    read = {name: example[name].tolist() for name in ("encoder_tokens", "tokens", "targets")}
    assert read == {"encoder_tokens": [9, 2], "tokens": [0, 10], "targets": [10, 11]}
