"""Tests instruction tuning: examples of conversations, truncation, invalid records, and the initial template."""

import collections

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pretrainax.config import UserError
from pretrainax.config.validation import validate
from pretrainax.data.objectives import ObjectiveInput
from pretrainax.data.sources import JsonLines, Parquet
from pretrainax.tasks import Instructions
from pretrainax.tokenization import ByteBPE, PretrainedTokenizer
from pretrainax.tokenization.chat import PLAIN, write_template
from tests.support import tiny

TOKENIZER = ByteBPE(vocab_size=280).build(iter(["Hi you, hello it rains", "User:\nAssistant:\n it rains"] * 20))
USER, ANSWER = {"role": "user", "content": "Hi you"}, {"role": "assistant", "content": "hello"}
TALK = {"messages": [USER, ANSWER, {"role": "user", "content": "and"}, {"role": "assistant", "content": "it rains"}]}


def adapted(length=60, **fields):
    experiment = tiny.get_config("gpt")
    experiment.data.sequence_length = length
    return Instructions(**fields).adapted(experiment).bind(TOKENIZER)


def text_of(task, record):
    (encoded,) = task.encode(task.read(record), TOKENIZER)
    ends, tokens = np.cumsum([len(ids) for ids in encoded.parts]), np.concatenate(encoded.parts)
    return ObjectiveInput(tokens, np.ones_like(tokens), ends, note={**encoded.note, "parts": ends.tolist()})


def test_the_loss_is_of_the_answers_and_of_the_ends_of_their_turns():
    task, end = adapted(), TOKENIZER.vocabulary.eos
    found = task.example(text_of(task, TALK), None, TOKENIZER.vocabulary)
    written = found["targets"][found["loss_weights"] > 0].tolist()
    assert written == [*TOKENIZER.encode("hello"), end, *TOKENIZER.encode("it rains"), end]
    assert found["tokens"][1:].tolist() == found["targets"][:-1].tolist()
    whole = "User:\nHi you\n\nAssistant:\nhello<|endoftext|>\n\nUser:\nand\n\nAssistant:\nit rains<|endoftext|>"
    assert TOKENIZER.decode(found["tokens"]).startswith(whole)


def test_what_is_read_before_the_last_answer_is_that_of_training():
    task = adapted(120)
    text = text_of(task, TALK)
    asked = task.prompt_example(text, TOKENIZER.vocabulary)["tokens"]
    assert TOKENIZER.decode(asked).endswith("User:\nand\n\nAssistant:\n")
    assert asked.tolist() == text.tokens[: len(asked)].tolist() and text.note["answer"] == "it rains"
    short = adapted(16).prompt_example(text, TOKENIZER.vocabulary)["tokens"]
    assert short.tolist() == asked[-8:].tolist()


def test_windows_line_ends_of_an_answer_do_not_make_it_wrong():
    record = {"messages": [USER, {"role": "assistant", "content": "it\r\nrains"}]}
    assert adapted().metrics(["it\nrains"], [text_of(adapted(), record).note]) == {"exact_match": 1.0}


def test_a_table_may_lack_the_input_but_not_the_output(tmp_path):
    table = {"instruction": ["Hi", "you"], "output": ["hello", "rain"]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")

    def texts(**fields):
        source = Parquet(str(tmp_path), valid_path=str(tmp_path)).reading(Instructions(messages_field=None, **fields))
        (shard,) = source.shards("train")
        return [record.texts for record in source.read(shard, collections.Counter())]

    assert texts() == texts(input_field="task.input") == [("Hi", "hello"), ("you", "rain")]
    with pytest.raises(UserError, match="a field of config.objective Instructions is 'answer'"):
        texts(output_field="answer")


def test_alpacas_fields_are_a_conversation_of_one_turn():
    task = adapted(messages_field=None)
    read = task.read({"instruction": "Say", "input": "it", "output": "rains"})
    assert read.texts == ("Say\n\nit", "rains") and read.note["roles"] == ["user", "assistant"]
    for record in ({"instruction": "Say", "input": "", "output": "rains"}, {"instruction": "Say", "output": "rains"}):
        assert task.read(record).texts == ("Say", "rains")
    nested = adapted(messages_field=None, input_field="task.input")
    assert nested.read({"instruction": "Say", "task": {"input": "it"}, "output": "rains"}).texts == read.texts
    assert task.fields == ("instruction", "input", "output") and adapted().fields == ("messages",)


def test_what_is_cut_is_counted():
    task = adapted(20)
    texts = [text_of(task, {"messages": [USER, ANSWER]}), text_of(task, TALK)]
    texts.append(text_of(task, {"messages": [{"role": "user", "content": "it rains " * 20}, ANSWER]}))
    found = [task.example(text, None, TOKENIZER.vocabulary) for text in texts]
    assert max(len(example["tokens"]) for example in found) == 20 and found[2]["loss_weights"].sum() == 0
    cut = sum(len(text.tokens) > 21 for text in texts)
    (said,) = task.warnings([text.note for text in texts])
    assert f"{cut} of 3 lose their end, and 1 of them all answers" in said and cut >= 2


def test_a_score_that_finds_no_words_in_most_answers_is_a_warning():
    task = adapted(scores=("rouge",))
    notes = [text_of(task, {"messages": [USER, ANSWER | {"content": text}]}).note for text in ("дождь", "и это", "it")]
    (said,) = task.warnings(notes)
    assert said.startswith("ROUGE FINDS NO WORDS in 2 of 3 answers")


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_that_does_not_fit_the_vocabulary_is_said():
    lacking, ends = adapted(template=CHATML).warnings([])
    assert "lacks <|im_end|>, <|im_start|>" in lacking
    assert "ANSWERS END WITH '<|im_end|>', which is not one special token: exported models stop only at" in ends
    *_, ends = adapted(template=CHATML.replace("<|im_end|>", "")).warnings([])
    assert ends.startswith("ANSWERS HAVE NO END")
    assert not list(adapted().warnings([]))


@pytest.mark.parametrize(
    "end, stop",
    [
        ("<|im_end|>", ("<|im_end|>",)),
        ("<|im_end|>' + eos_token + '", ("<|im_end|>",)),
        ("' + eos_token + '", ()),
        ("", ()),
    ],
)
def test_a_written_answer_ends_with_its_turn(end, stop):
    assert adapted(template=CHATML.replace("<|im_end|>", end)).stop == stop


@pytest.mark.parametrize(
    "record, said",
    [
        ({"messages": [USER]}, "no message is of the assistant"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "an answer of the assistant is empty"),
        ({"messages": []}, "it must be a list of messages, not empty"),
        ({"messages": "Hi"}, "holds str, it must be a list"),
        (
            {"messages": [USER, {"role": "assitant", "content": "a"}]},
            "message 2 .*'assitant', did you mean 'assistant'",
        ),
        ({"messages": [USER, {"from": "gpt", "value": "a"}]}, "message 2 .* 'role' and 'content'"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]}, "message 2 .*with strings"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"type": "function"}]}]}, "message 2 .*has 'tool_calls'"),
        ({"messages": [USER, {**ANSWER, "reasoning_content": "hm"}]}, "message 2 .*has 'reasoning_content'"),
        ({"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]}, "message 2 .*has the weight 0, but"),
        ({"messages": ["Hi", "hello"]}, "message 1 .*must be an object"),
        ({"conversation": [USER, ANSWER]}, "no field 'messages'.*config.objective.messages_field"),
    ],
)
def test_a_broken_record_says_what_is_wrong_with_it(record, said):
    with pytest.raises(ValueError, match=said):
        adapted().read(record)


def test_empty_parts_of_a_message_are_read():
    empty = {"tool_calls": [], "function_call": None, "reasoning_content": "", "thinking": False, "name": "x"}
    for weight in (None, 1, 1.0):
        messages = [USER | empty | {"weight": None}, ANSWER | empty | {"weight": weight}]
        assert adapted().read({"messages": messages}).texts == ("Hi you", "hello")


def config(**fields):
    experiment = tiny.get_config("gpt")
    experiment.data.source, experiment.objective = JsonLines(path=__file__), Instructions(**fields)
    return experiment


def test_a_wrong_template_is_one_line():
    with pytest.raises(UserError, match="config.objective.template is not a valid Jinja template"):
        validate(config(template="{{ messages"))
    with pytest.raises(UserError, match="config.objective.template is 'chat.jinja', which writes no message: set it"):
        validate(config(template="chat.jinja"))
    experiment = config()
    experiment.model.family = "encoder_decoder"
    with pytest.raises(UserError, match="Instructions, which trains config.model.family decoder"):
        validate(experiment)


def test_the_template_is_that_of_the_tokenizer_of_the_start_unless_one_is_given(tmp_path):
    write_template(str(tmp_path), "{{ messages[0].content }}")
    for given, found in ((None, "{{ messages[0].content }}"), (PLAIN, PLAIN)):
        experiment = config(template=given)
        experiment.tokenizer = PretrainedTokenizer(path=str(tmp_path))
        experiment.objective.complete(experiment)
        assert experiment.objective.template == found
    experiment = config()
    experiment.objective.complete(experiment)
    assert experiment.objective.template is None
