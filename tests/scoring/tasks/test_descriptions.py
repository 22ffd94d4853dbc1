"""Tests how a task is found, and the errors of wrong names, descriptions and examples."""

import gzip
import json
import re

import pytest

from pretrainax.config import UserError
from pretrainax.scoring.tasks.descriptions import KINDS, SHIPPED, read_task
from pretrainax.scoring.tasks.examples import find, read_examples
from pretrainax.scoring.tasks.run import load_tasks
from tests.support.docs_pages import how_to

PAGE = how_to("tasks")

# As published, including fields that the task does not read.
BLIMP = {
    "sentence_good": "These casseroles disgust Kayla.",
    "sentence_bad": "These casseroles disgusts Kayla.",
    "field": "morphology",
    "linguistics_term": "subject_verb_agreement",
    "UID": "regular_plural_subject_verb_agreement_1",
    "simple_LM_method": True,
    "pairID": "0",
}


def write(path, *records, **description):
    """Writes records as JSON Lines, or one description."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records or [description]))
    return str(path)


def asked(task: str) -> list:
    """Returns the questions that the task makes from its examples."""
    _, task = read_task(task)
    return [task.read(example) for example in read_examples(find(task.examples))]


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_task_of_the_package_reads_its_examples_or_asks_for_them(name):
    if name in ("blimp", "lambada", "gsm8k"):
        with pytest.raises(UserError, match=f"the task {name} comes without examples: give them, as --tasks={name}:my"):
            read_task(name)
    else:
        assert 10 <= len(asked(name)) <= 20


def test_blimp_works_as_it_is_published(tmp_path):
    write(tmp_path / "a.jsonl", BLIMP, BLIMP | {"UID": "other"})
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as f:
        f.write(json.dumps(BLIMP) + "\n\n")
    for path in (tmp_path, tmp_path / "*.jsonl*"):
        pairs = asked(f"blimp:{path}")
        assert [pair.group for pair in pairs] == [BLIMP["UID"], "other", BLIMP["UID"]]
        assert pairs[0][:2] == (BLIMP["sentence_good"], BLIMP["sentence_bad"])


def test_a_kind_by_itself_needs_no_description(tmp_path):
    examples = write(tmp_path / "x.jsonl", {"prompt": "One and one is", "choices": ["two", "six"], "answer": "six"})
    ((question, choices, answer),) = asked(f"multiple_choice:{examples}")
    assert question == ("One and one is", "One and one is six") and choices == ("two", "six") and answer == 1


def test_tasks_with_equal_names_are_numbered(tmp_path):
    paths = [write(tmp_path / name, {"text": f"One {name}"}) for name in ("a.jsonl", "b.jsonl")]
    found = load_tasks([f"cloze:{paths[0]}", "grammar", f"cloze:{paths[1]}"])
    assert [task.name for task in found] == ["cloze#1", "grammar", "cloze#2"]
    assert [task.asked[0].word for task in found[::2]] == [" a.jsonl", " b.jsonl"]


def test_a_description_names_fields_and_examples_from_where_it_lies(tmp_path):
    write(tmp_path / "mine.jsonl", {"q": 7, "a": 14.5})
    mine = write(tmp_path / "mine.json", kind="exact_match", prompt="twice {q}:", target="{a}", examples="mine.jsonl")
    assert read_task(mine)[0] == "mine"
    assert asked(mine) == [(("twice 7:", "twice 7: 14.5"), "14.5")]


def test_the_description_on_the_page_is_one(tmp_path):
    (description,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (line,) = re.findall(r"reads lines such as `(.*?)`", PAGE)
    (tmp_path / "my_task.json").write_text(description)
    (tmp_path / "capitals.jsonl").write_text(line)
    ((question, choices, answer),) = asked(str(tmp_path / "my_task.json"))
    assert question.shot.endswith("Austria?\nAnswer: Vienna") and choices[answer] == "Vienna"


def test_the_page_names_every_task_and_kind():
    rows = re.findall(r"^\| ([a-z_0-9, ]+) \| [a-z ]+ \| (?:\d+ included|yours)", PAGE, re.MULTILINE)
    assert {name for row in rows for name in row.split(", ")} == {*SHIPPED, *KINDS}


def test_the_last_word_keeps_its_space_and_its_mark(tmp_path):
    write(tmp_path / "x.jsonl", {"text": "They ran to the  shore.\n"}, {"text": "a\nb"})
    assert asked(f"cloze:{tmp_path}") == [("They ran to the", "  shore."), ("a", "\nb")]


@pytest.mark.parametrize(
    "said, number",
    [
        ("so it is\n#### 1,234.", "1234"),
        ("#### -7", "-7"),
        ("#### 5.50 dollars", "5.50"),
        ("#### 3 and #### 4", "3"),
        ("#### $3", None),  # like the strict match of the harness
        ("it is 18", None),
        ("", None),
    ],
)
def test_numbers_of_gsm8k_are_compared_as_by_the_harness(tmp_path, said, number):
    _, task = read_task(f"gsm8k:{tmp_path}")
    assert task.extract_answer(said) == number


def test_shots_are_the_first_examples_without_the_one_asked(tmp_path):
    _, task = read_task("sums")
    questions = [task.read(example).question for example in read_examples(find(task.examples))]
    assert task.with_shots(questions, 1) == ["2 + 3 = 5", "5 + 5 = 10", "7 + 2 = 9", "4 + 1 ="]
    assert task.with_shots(questions, 7) == ["2 + 3 = 5", "4 + 1 = 5", "5 + 5 = 10", "15 + 5 ="]
    assert task.with_shots(questions[:2], 0) == ["4 + 1 = 5", "2 + 3 ="]  # no other examples


@pytest.mark.parametrize(
    "task, message",
    [
        ("gramar", "unknown task 'gramar', did you mean 'grammar'\\? \\(or give your own description "),
        ("minimal_pair:x", "unknown task 'minimal_pair', did you mean 'minimal_pairs'"),
        ("none.json", "none.json is not a JSON file \\(No such file or directory\\)"),
        ("none.jsonl", "name its kind of task, as minimal_pairs:none.jsonl"),
        ("blimp:no/such/*.jsonl", "'no/such/\\*.jsonl' is no file, no folder with .jsonl files and no pattern"),
    ],
)
def test_a_task_that_is_not_there_is_one_line(task, message):
    with pytest.raises(UserError, match=message) as e:
        asked(task)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "description, message",
    [
        ({}, "kind is None, allowed: cloze, exact_match, minimal_pairs, multiple_choice, probe"),
        ({"kind": "cloz"}, "kind is 'cloz', did you mean 'cloze'"),
        ({"kind": "cloze", "promt": "x"}, "unknown field 'promt', allowed: about, examples, text"),
        ({"kind": "cloze", "type": "AdamW"}, "unknown field 'type', allowed: about, examples, text"),
        ({"kind": "exact_match", "shot": 1}, "unknown field 'shot', did you mean 'shots'"),
        ({"kind": "exact_match", "shots": "five"}, "shots is 'five', it must be of type int"),
        ({"kind": "exact_match", "shots": -1}, "shots is -1, it must be at least 0"),
        ({"kind": "exact_match", "max_new_tokens": 0}, "max_new_tokens is 0, it must be at least 1"),
        ({"kind": "exact_match", "answer": "("}, "answer is '\\(', which is no regular expression"),
        ({"kind": "exact_match", "ignore": ["["]}, "ignore is '\\[', which is no regular expression"),
    ],
)
def test_a_description_that_is_wrong_is_one_line_with_its_file(tmp_path, description, message):
    file = write(tmp_path / "mine.json", **description)
    with pytest.raises(UserError, match=message) as e:
        read_task(f"{file}:x")
    assert str(e.value).startswith(file) and "\n" not in str(e.value)


CHOICE = {"prompt": "Up or", "choices": ["down", "left"], "answer": 0}
SUM = {"prompt": "1 + 1 =", "answer": "2"}


@pytest.mark.parametrize(
    "kind, good, wrong, message",
    [
        ("minimal_pairs", BLIMP, {"UID": "x"}, "no field 'sentence_good', allowed: UID"),
        (
            "minimal_pairs",
            BLIMP,
            BLIMP | {"sentence_bad": ["x"]},
            "field 'sentence_bad' is \\['x'\\], it must be a text",
        ),
        (
            "multiple_choice",
            CHOICE,
            CHOICE | {"answer": 2},
            "'answer' is 2, it must be the index of a choice, 0 to 1, or",
        ),
        ("multiple_choice", CHOICE, CHOICE | {"answer": -1}, "field 'answer' is -1, it must be the index"),
        ("multiple_choice", CHOICE, CHOICE | {"answer": True}, "field 'answer' is True, it must be the index"),
        ("multiple_choice", CHOICE, CHOICE | {"answer": "up"}, "field 'answer' is 'up', it must be the index"),
        ("multiple_choice", CHOICE, CHOICE | {"choices": ["up"]}, "field 'choices' is \\['up'\\], it must be a list"),
        (
            "multiple_choice",
            CHOICE,
            {"prompt": "x", "choices": ["a", "b"]},
            "no field 'answer', allowed: choices, prompt",
        ),
        ("cloze", {"text": "a b"}, {"text": "alone"}, "the text is 'alone', it must have at least two words"),
        ("cloze", {"text": "a b"}, {"txt": "a b"}, "no field 'text', did you mean 'txt'"),
        ("exact_match", SUM, {"prompt": "x"}, "no field 'answer', allowed: prompt"),
        ("exact_match", SUM, SUM | {"prompt": None}, "field 'prompt' is None, it must be a text or a number"),
        (
            "gsm8k",
            {"question": "?", "answer": "#### 1"},
            {"question": "?", "answer": "1"},
            "target '1' has no answer as",
        ),
    ],
)
def test_an_example_that_is_wrong_is_one_line_with_file_and_line(tmp_path, kind, good, wrong, message):
    file = write(tmp_path / "x.jsonl", good, good, wrong)
    with pytest.raises(UserError, match=message) as e:
        asked(f"{kind}:{file}")
    assert str(e.value).startswith(f"{file}:3: ") and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", ":2: broken JSON at column"),
        ("[1]", ":2: a JSON object is needed"),
        (r'{"choices": ["\ud800 a"]}', ":2: .* surrogates not allowed"),
    ],
)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_line_that_is_no_object_is_one_line_with_file_and_line(tmp_path, kind, line, message):
    (tmp_path / "x.jsonl").write_text("\n" + line + "\n")
    with pytest.raises(UserError, match=message):
        asked(f"{kind}:{tmp_path}")


def test_a_file_without_examples_is_one_line(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no example: give a file of JSON lines that has some"):
        asked(f"cloze:{tmp_path}")
