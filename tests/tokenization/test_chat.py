"""Compares chat templates with transformers: the text of a conversation, its ids, and the ids of its answers."""

import json

import numpy as np
import pytest
import tokenizers

from pretrainax.config import UserError
from pretrainax.tokenization import ByteBPE, Unigram
from pretrainax.tokenization.chat import PLAIN, Chat, read_template, write_template
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.huggingface_export import write_tokenizer
from tests.golden.case import needs_transformers
from tests.support import tiny

TEXT = ["Hello you and me", "User asks, the assistant answers: 12 and 3.", "some system says héllo"] * 30
TALK = [
    {"role": "system", "content": "Be good."},
    {"role": "user", "content": "Hello you"},
    {"role": "assistant", "content": "and me: héllo 😀"},
    {"role": "user", "content": "12 and 3?\nOr 4?"},
    {"role": "assistant", "content": " some\n"},
]
JSON = (
    "{% for m in messages %}{{ m | tojson(ensure_ascii=True) }}{{ m.content | tojson(4) }}"
    "{{ m | tojson(indent=2, separators=(',', '=')) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=True) }}{% endfor %}"
)
ANSWERS = [message["content"] for message in TALK if message["role"] == "assistant"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{% if m.role == 'assistant' %}{{ m.content + "
    "eos_token }}{% else %}{{ '[INST] ' + m.content + ' [/INST] ' }}{% endif %}{% endfor %}"
)
MARKED = (
    "{%- for m in messages -%}{{ '<' + m.role + '>' }}{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content }}"
    "{{ eos_token }}{%- endgeneration -%}{%- else -%}{{ m.content | tojson }}{%- endif -%}{%- endfor -%}"
)


@pytest.fixture(scope="module", params=["bytes", "unigram", "added"])
def tokenizer(request, tmp_path_factory):
    """Returns one of our tokenizers of each kind, or a foreign tokenizer with tokens for roles."""
    if request.param == "unigram":
        return Unigram(vocab_size=297).build(iter(TEXT))
    ours = ByteBPE(vocab_size=290).build(iter(TEXT))
    if request.param == "bytes":
        return ours
    folder = tmp_path_factory.mktemp("added")
    write_tokenizer(ours, str(folder), tiny.get_config("gpt").model)
    described = json.loads((folder / "tokenizer.json").read_text())
    for i, piece in enumerate(("<|im_start|>", "<|im_end|>"), ours.vocabulary.size):
        described["added_tokens"].append({**described["added_tokens"][0], "id": i, "content": piece})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|im_end|>"}))
    return read_tokenizer(str(folder))


@pytest.mark.parametrize("template", [PLAIN, CHATML, LLAMA, MARKED])
def test_answers_are_what_the_assistant_says_with_the_end_of_its_turn(template, tokenizer):
    chat = Chat(template, tokenizer)
    text, spans = chat.render(TALK)
    said = [text[start:end] for start, end in spans]
    eos = tokenizer.special_pieces[tokenizer.vocabulary.eos]
    assert said == [answer + ("<|im_end|>" if template == CHATML else eos) for answer in ANSWERS]
    ids, is_answer = chat.encode(TALK)
    starts, ends = (np.flatnonzero(np.diff(is_answer.astype(int), prepend=0, append=0) == step) for step in (1, -1))
    assert len(starts) == 2
    for start, end, answer in zip(starts, ends, said, strict=True):
        assert tokenizer.decode(ids[start:end]).lstrip("\n ") == answer.lstrip()


@needs_transformers
@pytest.mark.parametrize("template", [PLAIN, CHATML, LLAMA, MARKED])
def test_ids_and_answers_are_those_of_transformers(template, tokenizer, tmp_path):
    import transformers

    write_tokenizer(tokenizer, str(tmp_path), tiny.get_config("gpt").model, template)
    theirs, chat = transformers.AutoTokenizer.from_pretrained(str(tmp_path)), Chat(template, tokenizer)
    assert read_template(str(tmp_path)) == template == theirs.chat_template
    ids, is_answer = chat.encode(TALK)
    found = theirs.apply_chat_template(
        TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=chat.marks_answers
    )
    assert found["input_ids"] == ids.tolist()
    if chat.marks_answers:
        assert found["assistant_masks"] == is_answer.astype(int).tolist()
    else:
        prompt = theirs.apply_chat_template(TALK[:4], tokenize=True, return_dict=True, add_generation_prompt=True)
        assert (
            prompt["input_ids"] == ids[: np.flatnonzero(np.diff(is_answer))[-1 if is_answer[-1] else -2] + 1].tolist()
        )


@needs_transformers
def test_the_filter_tojson_takes_the_arguments_of_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    (wanted,), _ = render_jinja_template([TALK[:3]], chat_template=JSON)
    assert Chat(JSON, ByteBPE(vocab_size=290).build(iter(TEXT))).prompt(TALK[:3]) == wanted


def test_a_conversation_is_encoded_whole_whatever_length_the_tokenizer_file_stores(tmp_path):
    ours = ByteBPE(vocab_size=290).build(iter(TEXT))
    write_tokenizer(ours, str(tmp_path), tiny.get_config("gpt").model)
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    file.enable_truncation(8)
    file.enable_padding(length=32)
    file.save(str(tmp_path / "tokenizer.json"))
    stored = read_tokenizer(str(tmp_path))
    assert json.loads(stored.model)["truncation"]["max_length"] == 8
    for found, wanted in zip(Chat(PLAIN, stored).encode(TALK), Chat(PLAIN, ours).encode(TALK), strict=True):
        assert len(wanted) > 32 and found.tolist() == wanted.tolist()


@pytest.mark.parametrize("tag", ["{%generation%}", "{%+ generation %}", "{%-  generation -%}", "{%\ngeneration\n%}"])
def test_answers_are_marked_by_all_spellings_of_the_tag(tag):
    chat = Chat(MARKED.replace("{%- generation -%}", tag), ByteBPE(vocab_size=290).build(iter(TEXT)))
    text, spans = chat.render(TALK)
    assert chat.marks_answers and [text[start:end] for start, end in spans] == [f"{a}<|endoftext|>" for a in ANSWERS]


def test_tokens_that_the_vocabulary_lacks_are_named():
    ours = ByteBPE(vocab_size=290).build(iter(TEXT))
    assert Chat(CHATML, ours).lacking == ["<|im_end|>", "<|im_start|>"] and Chat(PLAIN, ours).lacking == []


def test_an_answer_ends_with_what_follows_its_content():
    ours = ByteBPE(vocab_size=290).build(iter(TEXT))
    no_end = CHATML.replace("<|im_end|>", "")
    ends = [Chat(template, ours).end_of_turn for template in (CHATML, PLAIN, LLAMA, MARKED, no_end)]
    assert ends == ["<|im_end|>", "<|endoftext|>", "<|endoftext|>", "<|endoftext|>", ""]


@pytest.mark.parametrize(
    "template, said",
    [
        ("{% for m in messages %}", "is not a valid Jinja template"),
        ("{{ raise_exception('no system message') }}", "fails .*no system message.*'Be good.'"),
        ("{{ messages[9].content }}", "fails|is not"),
        ("{{ messages.__class__.__mro__ }}", "fails .*SecurityError"),
        ("{{ messages | length }}{{ messages[-1].content }}", "renders the start of a conversation differently"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_line(template, said):
    with pytest.raises(UserError, match=said):
        Chat(template, ByteBPE(vocab_size=290).build(iter(TEXT))).encode(TALK)


def test_the_template_of_a_directory_is_found_wherever_transformers_writes_it(tmp_path):
    assert read_template(str(tmp_path)) is None
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    for written, found in (("c", "c"), (named, "b"), (None, None)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": written}))
        assert read_template(str(tmp_path)) == found
    write_template(str(tmp_path), "d")
    assert read_template(str(tmp_path)) == "d"
