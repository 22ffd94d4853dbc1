"""Compares the metrics of tasks with log-likelihoods added here token by token, for each family."""

import json
import math

import jax
import numpy as np
import pytest

from pretrainax.config import UserError
from pretrainax.inference.decoding import generate
from pretrainax.inference.request import Sampling
from pretrainax.scoring.results import Estimate, results_table
from pretrainax.scoring.span_forms import Ids, span_formats
from pretrainax.scoring.tasks.likelihoods import continuations, sentence_log_likelihoods, split
from pretrainax.scoring.tasks.run import load_tasks, run_tasks
from pretrainax.scoring.tasks.task import mean
from tests.support.loaded import loaded_case

LONGEST = 20  # All rows have this length, for a single compilation.
PAIRS = [
    ("the cat sat.", "the cat sit.", "verbs"),
    ("a dog runs", "a dogs runs", "nouns"),
    ("we see it", "we sees it", "verbs"),
    ("they go", "they goes", "verbs"),
    ("an ant", "a ant", "nouns"),
]
QUESTIONS = [
    ("up", ["sky", "a cave"], 0),
    ("wet", ["dust", "sea", "sand"], 1),
    ("fly", ["bird", "sun"], 0),
]


@pytest.fixture(scope="module")
def decoder():
    return loaded_case("gpt2")


def log_probs(loaded, rows: list[list[int]], **more) -> np.ndarray:
    """Returns the log-probabilities of every token at every place, [B, T, V]."""
    tokens = np.zeros((len(rows), LONGEST), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows])[:, None]
    places = np.broadcast_to(np.arange(LONGEST, dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": places, "segment_ids": (places < lengths).astype(np.int32)} | more
    return np.asarray(jax.nn.log_softmax(loaded(batch).logits))


def left_to_right(loaded, texts: list[str]) -> list[float]:
    """Returns the log-likelihood of each text after the BOS token."""
    ids = [[loaded.tokenizer.vocabulary.bos, *loaded.tokenizer.encode(text)] for text in texts]
    found = log_probs(loaded, ids)
    return [sum(found[row, i - 1, of[i]] for i in range(1, len(of))) for row, of in enumerate(ids)]


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def results(loaded, task: str, most=None) -> dict[tuple[str, str], tuple]:
    """Returns {(measure, part): result} of a task."""
    (found,) = run_tasks(loaded, load_tasks([task]), most)
    return {(result.measure, result.part): result for result in found}


@pytest.fixture(scope="module")
def blimp(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("blimp") / "pairs.jsonl"
    return "blimp:" + write(path, ({"sentence_good": g, "sentence_bad": b, "UID": uid} for g, b, uid in PAIRS))


def test_minimal_pairs_of_a_decoder_are_by_log_likelihood(decoder, blimp):
    good, bad = (left_to_right(decoder, list(sentences)) for sentences in list(zip(*PAIRS, strict=True))[:2])
    right = [g > b for g, b in zip(good, bad, strict=True)]
    assert 0 < sum(right) < len(right)
    verbs = [r for r, pair in zip(right, PAIRS, strict=True) if pair[2] == "verbs"]
    nouns = [r for r, pair in zip(right, PAIRS, strict=True) if pair[2] == "nouns"]
    found = results(decoder, blimp)
    for part, of in (("", right), ("nouns", nouns), ("verbs", verbs)):
        result = found["accuracy", part]
        assert (result.value, result.counts) == (pytest.approx(np.mean(of)), {"examples": len(of)})
        error = np.std(of, ddof=1) / math.sqrt(len(of)) or None  # None for equal examples.
        assert result.standard_error == (error and pytest.approx(error))
    assert found["accuracy", ""].how.endswith("left to right") and len(found) == 3


def test_a_sentence_of_an_encoder_is_its_pseudo_log_likelihood():
    loaded, sentence = loaded_case("bert_masked_lm"), "a dog runs"
    vocabulary = loaded.tokenizer.vocabulary
    ids = [vocabulary.cls, *loaded.tokenizer.encode(sentence), vocabulary.sep]
    places = range(1, len(ids) - 1)
    masked = [[*ids[:place], vocabulary.mask, *ids[place + 1 :]] for place in places]
    found = log_probs(loaded, masked, token_types=np.zeros((len(masked), LONGEST), np.int32))
    expected = sum(found[row, place, ids[place]] for row, place in enumerate(places))
    assert sentence_log_likelihoods(loaded, [sentence]) == pytest.approx([expected], abs=1e-4)


@pytest.mark.slow
def test_a_sentence_of_a_model_that_fills_holes_is_asked_for_word_by_word_behind_the_first():
    loaded = loaded_case("t5_1_1")
    (form,) = span_formats(loaded)
    words = [loaded.tokenizer.encode(word) for word in ("a", " dog", " runs", ".")]
    expected = 0.0
    for i, word in list(enumerate(words))[1:]:
        left, right = (np.concatenate([np.zeros(0, np.int32), *part]) for part in (words[:i], words[i + 1 :]))
        (example,) = form.examples_for(Ids(left.astype(np.int32), word, right.astype(np.int32), is_start=True))
        batch = {name: x[None] for name, x in example.items() if name not in ("targets", "loss_weights")}
        found = np.asarray(jax.nn.log_softmax(loaded(batch).logits))[0]
        asked = np.flatnonzero(example["loss_weights"])
        assert len(asked) == len(word) + 1  # including the next sentinel, which ends the word
        expected += found[asked, example["targets"][asked]].sum()
    assert sentence_log_likelihoods(loaded, ["a dog runs."]) == pytest.approx([expected], abs=1e-3)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["bert_masked_lm", "t5_1_1"])
def test_other_families_have_figures_for_all_they_can_be_asked(name, blimp, tmp_path):
    loaded = loaded_case(name)
    choice = [{"prompt": prompt, "choices": choices, "answer": answer} for prompt, choices, answer in QUESTIONS]
    task = "multiple_choice:" + write(tmp_path / "x.jsonl", choice)
    assert 0 <= results(loaded, blimp)["accuracy", ""].value <= 1
    assert 0 <= results(loaded, task, 1)["accuracy", ""].value <= 1
    words = "cloze:" + write(tmp_path / "y.jsonl", [{"text": "the sea is wide"}])
    assert results(loaded, words)["perplexity", ""].value > 1


@pytest.mark.parametrize("shots", [0, 1])
def test_choices_are_compared_plain_per_byte_and_beside_their_likelihood_alone(decoder, tmp_path, shots):
    records = [{"q": prompt, "choices": choices, "answer": answer} for prompt, choices, answer in QUESTIONS]
    write(tmp_path / "mine.jsonl", records)
    fields = {"prompt": "{q}", "separator": ".", "unconditional": "so", "examples": "mine.jsonl", "shots": shots}
    (tmp_path / "mine.json").write_text(json.dumps({"kind": "multiple_choice"} | fields))
    right = {"accuracy": [], "accuracy_per_byte": [], "accuracy_unconditional": []}
    for number, (prompt, choices, answer) in enumerate(QUESTIONS):
        if shots:
            q, other, a = QUESTIONS[1 if number == 0 else 0]
            prompt = f"{q} {other[a]}.{prompt}"
        texts = [f"{context} {choice}" for context in (prompt, "so") for choice in choices]
        *found, of_prompt, of_so = left_to_right(decoder, [*texts, prompt, "so"])
        given, alone = np.array(found[: len(choices)]) - of_prompt, np.array(found[len(choices) :]) - of_so
        sizes = [len(choice) for choice in choices]
        for hits, scores in zip(right.values(), (given, given / sizes, given - alone), strict=True):
            hits.append(np.argmax(scores) == answer)
    found = results(decoder, str(tmp_path / "mine.json"))
    assert {measure: result.value for (measure, _), result in found.items()} == pytest.approx(
        {measure: np.mean(hits) for measure, hits in right.items()}
    )
    assert len({tuple(hits) for hits in right.values()}) > 1  # The metrics differ here.


def test_a_last_word_costs_its_likelihood_after_the_text(decoder, tmp_path):
    texts = [("the sea is", " wide"), ("we saw", " it"), ("up and", " down")]
    task = "cloze:" + write(tmp_path / "x.jsonl", ({"text": before + word} for before, word in texts))
    whole, before = (left_to_right(decoder, of) for of in (["".join(t) for t in texts], [t[0] for t in texts]))
    nats = np.subtract(before, whole)
    found = results(decoder, task)
    perplexity = found["perplexity", ""]
    assert perplexity.value == pytest.approx(math.exp(nats.mean()), rel=1e-4)
    error = math.exp(nats.mean()) * np.std(nats, ddof=1) / math.sqrt(3)  # the first term of the series of exp
    assert perplexity.standard_error == pytest.approx(error, rel=1e-3)
    assert found["accuracy", ""].value == 0


def test_a_continuation_is_the_best_where_no_other_token_is_more_likely(decoder):
    letters = "abcdefghijklmnopqrstuvwxyz"
    ids = [[decoder.tokenizer.vocabulary.bos, decoder.tokenizer.encode(x)[0]] for x in letters]
    best = log_probs(decoder, ids)[:, 1].argmax(-1)
    said = continuations(decoder, [(x, y) for x in letters for y in letters])
    expected = [best[i] == decoder.tokenizer.encode(y)[0] for i in range(26) for y in letters]
    assert [of.is_best for of in said] == expected and any(expected)


def test_a_prompt_that_is_too_long_is_counted(decoder, tmp_path):
    longest = decoder.experiment.model.position.max_length
    task = "cloze:" + write(tmp_path / "x.jsonl", [{"text": "a " * longest + "end"}, {"text": "the end"}])
    assert results(decoder, task)["accuracy", ""].counts == {"examples": 1, TOO_LONG: 1}


TOO_LONG = "not asked: too long for the context"
LONG = {  # For each kind, an example that fits into 20 tokens, and an example that does not.
    "minimal_pairs": [
        {"sentence_good": "an ant", "sentence_bad": "a ant", "UID": ""},
        {"sentence_good": "an ant " * 9, "sentence_bad": "a ant", "UID": ""},
    ],
    "multiple_choice": [
        {"prompt": "up", "choices": ["sky", "sea"], "answer": 0},
        {"prompt": "up", "choices": ["sky", "sea" * 9], "answer": 0},
    ],
    "cloze": [{"text": "the end"}, {"text": "the end" + "s" * 20}],
    "exact_match": [{"prompt": "h", "answer": "i"}, {"prompt": "j" * 18, "answer": "k"}],
}


@pytest.mark.parametrize("kind", LONG)
def test_an_example_that_does_not_fit_is_not_asked(decoder, tmp_path, kind):
    fits, too_long = LONG[kind]
    fields = {"kind": kind} | ({"max_new_tokens": 4} if kind == "exact_match" else {})
    fields |= {"unconditional": "so"} if kind == "multiple_choice" else {}
    for name, records in (("both", [fits, too_long]), ("long", [too_long])):
        write(tmp_path / f"{name}.jsonl", records)
        (tmp_path / f"{name}.json").write_text(json.dumps(fields | {"examples": f"{name}.jsonl"}))
    for result in results(decoder, str(tmp_path / "both.json")).values():
        assert result.counts == {"examples": 1, TOO_LONG: 1} and result.value == result.value
    for result in (found := results(decoder, str(tmp_path / "long.json"))).values():
        assert result.counts == {"examples": 0, TOO_LONG: 1} and math.isnan(result.value)
    assert "not asked" in results_table(list(found.values()))


def test_a_model_that_fills_holes_is_given_some_text(tmp_path):
    choice = {"prompt": "", "choices": ["a", "b"], "answer": 0}
    with pytest.raises(UserError, match="t5_1_1 fills holes in a text: give prompts that are not empty"):
        results(loaded_case("t5_1_1"), "multiple_choice:" + write(tmp_path / "x.jsonl", [choice]))


def test_fewer_examples_are_spread_over_all_and_it_is_said(decoder, blimp):
    few = results(decoder, blimp, 2)
    assert few["accuracy", ""].counts == {"examples": 2, "left out by --examples": 3}
    assert few["accuracy", "verbs"].counts == {"examples": 2}  # the first and the third example
    assert results(decoder, blimp, 9)["accuracy", ""].counts == {"examples": 5}


@pytest.mark.parametrize("most", [0, -1])
def test_a_limit_below_one_is_refused(decoder, blimp, most):
    with pytest.raises(UserError, match=f"--examples={most}: it must be at least 1"):
        results(decoder, blimp, most)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["gpt2", "t5_1_1"])
def test_what_is_written_is_compared_with_the_answer(name, tmp_path):
    loaded, questions = loaded_case(name), ["a:", "b:", "c:"]
    sampling = Sampling(max_new_tokens=4)
    said = [
        text.text for text in generate(loaded, [f"a: x;{q}" if q != "a:" else "b: y;a:" for q in questions], sampling)
    ]
    records = [
        {"prompt": "a:", "answer": "x"},
        {"prompt": "b:", "answer": "y"},
        {"prompt": "c:", "answer": said[2]},
    ]
    assert said[0].strip() != "x" and said[1].strip() != "y"
    write(tmp_path / "mine.jsonl", records)
    fields = {"examples": "mine.jsonl", "separator": ";", "shots": 1, "max_new_tokens": 4, "stop": []}
    (tmp_path / "mine.json").write_text(json.dumps({"kind": "exact_match"} | fields))
    found = results(loaded, str(tmp_path / "mine.json"))
    assert found["exact_match", ""].value == pytest.approx(1 / 3) and found["answered", ""].value == 1


def test_shots_are_left_out_where_there_is_no_room_and_it_is_said(decoder, tmp_path):
    """The model reads 20 tokens: one precedes the text, and 4 are for the answer."""
    records = [{"prompt": "abcdef", "answer": "g"}, {"prompt": "h", "answer": "i"}, {"prompt": "j" * 18, "answer": "k"}]
    write(tmp_path / "mine.jsonl", records)
    fields = {"examples": "mine.jsonl", "separator": ";", "shots": 2, "max_new_tokens": 4, "answer": "[a-z]"}
    (tmp_path / "mine.json").write_text(json.dumps({"kind": "exact_match"} | fields))
    assert results(decoder, str(tmp_path / "mine.json"))["exact_match", ""].counts == {
        "examples": 2,
        TOO_LONG: 1,
        "prompts with fewer shots": 2,
    }


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_an_answer_has_all_the_room_that_the_model_has(name, tmp_path):
    """A decoder does not read the last token of an answer. An encoder-decoder reads prompt and answer separately."""
    loaded = loaded_case(name)
    room = {"gpt2": 20 - 7 + 1, "bart": 20}[name]
    write(tmp_path / "mine.jsonl", [{"prompt": "abcdef", "answer": "g"}])
    for length, counts in ((room, {"examples": 1}), (room + 1, {"examples": 0, TOO_LONG: 1})):
        fields = {"kind": "exact_match", "examples": "mine.jsonl", "max_new_tokens": length}
        (tmp_path / "mine.json").write_text(json.dumps(fields))
        assert results(loaded, str(tmp_path / "mine.json"))["exact_match", ""].counts == counts


def test_an_encoder_is_not_asked_to_write(blimp):
    """The error comes before any task runs."""
    with pytest.raises(UserError, match="is an encoder, which cannot generate text: leave out tasks of the kind"):
        next(run_tasks(loaded_case("bert_masked_lm"), load_tasks([blimp, "sums"])))


def test_the_standard_error_of_a_mean_is_that_of_the_sample():
    assert mean([1, 0, 1, 1])[:2] == (0.75, pytest.approx(0.25))
    assert mean([2.0]) == Estimate(2.0, None)


def test_text_and_continuation_part_where_their_tokens_do(decoder):
    encode = decoder.tokenizer.encode
    for text, continuation in (("ab", " cd"), ("ab ", "cd"), ("", "ab cd")):
        ids = split(decoder.tokenizer, text, continuation)
        assert ids.left.tolist() == encode(text.rstrip()).tolist() and not len(ids.right)
        assert [*ids.left, *ids.span] == encode(text + continuation).tolist()
    with pytest.raises(UserError, match="'' after 'ab' has no token in this model's vocabulary"):
        split(decoder.tokenizer, "ab", "")
