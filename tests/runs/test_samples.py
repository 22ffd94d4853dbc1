"""Tests samples at the end of a run: filled spans and masks, and continued text, as whole words on one line."""

import re
from types import SimpleNamespace
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax.config import ModelConfig
from pretrainax.data.batch import Lengths
from pretrainax.data.objectives.spans import encoder_decoder_example
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.outputs import Outputs
from pretrainax.runs import sample_text
from pretrainax.runs import samples as samples_module
from pretrainax.runs.samples import prompted, samples
from pretrainax.runs.train import train
from pretrainax.tokenization.base import Vocabulary
from tests.support import tiny
from tests.support.loaded import loaded_case
from tests.support.runs import arrays, write_text

PIECES = ["</s>", "[CLS]", "<X>", "<Y>", *"thank you for inviting me last week ##ing ##s \n 12 34".split(" ")]
ID = {piece: i for i, piece in enumerate(PIECES)}
VOCABULARY = Vocabulary(size=len(PIECES), pad=0, eos=0, cls=1, sentinels=(2, 3))
BEGINS = np.array([not piece.startswith("##") for piece in PIECES])
TOKENIZER = SimpleNamespace(
    vocabulary=VOCABULARY,
    special_pieces={i: PIECES[i] for i in VOCABULARY.special_ids},
    spellings=lambda: [p[2:].encode() if p.startswith("##") else f" {p}".encode() for p in PIECES],
    word_edges=(BEGINS, np.array([i in VOCABULARY.special_ids for i in range(len(PIECES))])),
)


class Recites(nn.Module):
    """A model that predicts the next token of `line` with certainty. It has more rows than pieces."""

    line: tuple[int, ...]
    config: ClassVar[ModelConfig] = ModelConfig(vocab_size=len(PIECES) + 3)

    def __call__(self, batch, *, deterministic):
        follows = np.zeros((len(PIECES), self.config.vocab_size), np.float32)
        follows[:, len(PIECES) :] = 50.0  # rows without a piece, which samples must ignore
        for token, after in zip(self.line, self.line[1:], strict=False):
            follows[token, after] = 100.0
        tokens = batch["tokens"]
        if "masked_positions" in batch:  # predicts from the token before the mask
            tokens = jnp.take_along_axis(tokens, jnp.maximum(batch["masked_positions"] - 1, 0), axis=1)
        return Outputs({"lm": LanguageModelOutput(jax.nn.one_hot(tokens, len(PIECES)), jnp.asarray(follows))})


def ids(text: str) -> np.ndarray:
    return np.array([ID[piece] for piece in text.split(" ")], np.int32)


def say(line: str, *examples, room: int = 32, **options) -> list[str]:
    """Returns the samples without their summary."""
    return [text for text in all_lines(line, *examples, room=room, **options) if "predicted token" not in text]


def all_lines(line: str, *examples, room: int = 32, **options) -> list[str]:
    model = Recites(tuple(ids(line).tolist()))
    return list(samples(model, {}, examples, Lengths(room, room, room), TOKENIZER, **options))


def pair(source: str, targets: str):
    return encoder_decoder_example(ids(source), ids(targets), start=0)


def masked(tokens: str, targets: str, places: list[int], weights=None):
    return {
        "tokens": ids(tokens),
        "segment_ids": np.ones(len(ids(tokens)), np.int32),
        "masked_positions": np.array(places, np.int32),
        "targets": ids(targets),
        "loss_weights": np.ones(len(places), np.float32) if weights is None else np.array(weights, np.float32),
    }


def causal(tokens: str, **more):
    n = len(ids(tokens))
    return {"tokens": ids(tokens), "segment_ids": np.ones(n, np.int32), "targets": np.zeros(n, np.int32), **more}


def test_spans_are_filled_in_and_a_wrong_one_shows_the_truth():
    example = pair("thank you <X> me <Y> week </s>", "<X> for inviting <Y> last </s>")
    (text,) = say("</s> <X> for you <Y> last inviting", example)
    assert text == "100%  thank you [for] […] me […] week"


def test_the_last_line_counts_the_correct_tokens_and_the_likely_ones():
    example = masked("[CLS] thank </s> me </s> last", "you last </s>", [2, 4, 1], weights=[1, 1, 0])
    *_, summary = all_lines("thank you me inviting", example)
    assert summary == (
        "2 predicted tokens in 1 row: 50% are correct; the true token is among the 10 most likely for 100%"
    )


def test_masks_are_filled_in_and_a_wrong_one_shows_the_truth():
    example = masked("[CLS] thank </s> me </s> last", "you last </s>", [2, 4, 1], weights=[1, 1, 0])
    (text,) = say("thank you me inviting", example)
    assert text == "100%  thank [you] me […] last"


def test_an_answer_is_shown_beside_the_true_one_and_may_end_earlier():
    (text,) = say("</s> thank you for me", pair("inviting me </s>", "thank you inviting </s>"))
    assert text == "inviting me ⟶ [thank you for ≠ thank you inviting]"
    (text,) = say("</s> thank </s>", pair("inviting me </s>", "thank you inviting </s>"))
    assert text == "inviting me ⟶ [thank ≠ thank you inviting]"


def test_a_text_is_continued_from_its_first_half():
    (text,) = say("thank you for inviting me last", causal("thank you for me week week"))
    assert text == "thank you for ⟶ inviting me"  # the last word may be incomplete


def test_an_example_may_have_a_denominator():
    (text,) = say("thank you for inviting me last", causal("thank you for me week week", denominator=np.float32(3)))
    assert text == "thank you for ⟶ inviting me"


def test_a_text_is_continued_from_its_prefix_and_no_farther_than_its_end():
    example = causal("thank you for me me", prefix_mask=np.array([1, 1, 1, 0, 0], np.int32))
    (text,) = say("thank you for inviting me last", example)
    assert text == "thank you for ⟶ inviting"


def test_a_continuation_stops_where_the_model_ends_its_text():
    (text,) = say("me for </s> last", causal("thank you me me me me me me"))
    assert text == "thank you me me ⟶ for"


def test_a_word_of_which_a_part_was_asked_is_shown_whole():
    example = masked("you thank </s> week </s>", "##ing ##s", [2, 4])
    (text,) = say("thank ##s week ##s", example)
    assert text == "100%  you [thanks ≠ thanking] […]"


def test_a_text_that_begins_or_is_cut_within_a_word_is_shown_without_that_part():
    (text,) = say("you for", masked("##ing you </s> " + "thank ##s " * 60 + "you", "for", [2]), room=200)
    assert text.startswith("100%  you [for] thanks") and text.endswith("thanks")
    assert len(text.split()) <= sample_text.MAX_TOKENS


@pytest.mark.parametrize("line", ["thank \n week 12", "thank ##ing [CLS] 12"])
def test_a_line_is_one_line_without_special_pieces_or_marks_of_parts(line):
    examples = (
        masked("[CLS] thank \n </s> ##s </s> you", "\n", [3]),
        pair("thank \n <X> ##s </s>", "<X> ##ing \n </s>"),
        pair("thank \n ##s </s>", "##ing \n you </s>"),
        causal("[CLS] thank \n you ##s </s> week \n last"),
    )
    for example in examples:
        (text,) = say(line, example)
        assert not re.search(r"\n|##|\[CLS\]|</s>|\ufffd", text), text


def test_of_the_texts_those_with_words_are_taken():
    numbers = [pair("12 34 12 34 <X> 12 </s>", "<X> 34 </s>")] * 12
    words = pair("thank you <X> me </s>", "<X> for </s>")
    texts = say("<X> for", *numbers, words, *numbers, count=1)
    assert texts == ["100%  thank you [for] me"]


def test_of_the_texts_with_words_the_one_with_the_most_confident_prediction_is_taken():
    unsure = pair("thank you <Y> me </s>", "<Y> for </s>")  # no token follows <Y>, so all are equally likely
    sure = pair("thank you <X> week </s>", "<X> for </s>")
    assert say("<X> last", unsure, sure, count=1) == ["100%  thank you [last ≠ for] week"]


def test_it_stops_when_it_is_told_to_and_shows_no_half_of_an_answer():
    example = pair("thank you </s>", "for inviting me </s>")
    asked = []  # before the choice, before the example, before each of the first two tokens
    assert say("</s> for inviting", example, stop=lambda late: len(asked.append(late) or asked) > 3) == []
    assert asked == [False] * 4


def test_it_stops_when_time_is_up_counted_from_when_the_model_is_compiled(monkeypatch):
    clock = iter(range(100, 10_000, 3))  # 3 s between two readings
    monkeypatch.setattr(samples_module.time, "monotonic", lambda: next(clock))
    examples = [masked("thank </s> me", "you", [1])] * 4
    assert len(say("thank you", *examples)) == 2


def test_one_model_is_compiled_once_for_all_texts(monkeypatch):
    traced = []
    apply = Recites.__call__
    monkeypatch.setattr(Recites, "__call__", lambda *args, **kwargs: traced.append(1) or apply(*args, **kwargs))
    examples = [pair("thank you <X> me </s>", "<X> for inviting </s>"), pair("you <X> </s>", "<X> for </s>")]
    assert len(say("<X> for inviting", *examples)) == 2
    assert len(traced) == 1


@pytest.mark.slow
def test_prompts_are_filled_in_or_gone_on_with_and_a_wrong_one_says_why():
    filled, wrong = prompted(loaded_case("bert"), ["a[MASK]c \n d", "no mask"])
    assert re.fullmatch(r"a\[MASK\]c d ⟶ a.c d", filled)
    assert wrong.startswith("no mask ⟶ no result: the text has no hole to fill in")
    (told,) = prompted(loaded_case("gpt2"), ["abc"])
    assert told.startswith("abc ⟶ ") and "\n" not in told


@pytest.mark.slow
def test_prompts_stop_when_they_are_told_to_and_when_time_is_up(monkeypatch):
    asked = []
    assert (
        list(prompted(loaded_case("bert"), ["a[MASK]c"] * 3, lambda late: len(asked.append(late) or asked) > 1)) != []
    )
    assert asked == [False, False]
    clock = iter(range(100, 10_000, 3))  # 3 s between two readings
    monkeypatch.setattr(samples_module.time, "monotonic", lambda: next(clock))
    assert len(list(prompted(loaded_case("bert"), ["a[MASK]c"] * 4, bool))) == 2


@pytest.mark.slow
def test_validations_show_samples_and_do_not_change_the_training(tmp_path, capsys):
    for name, each_validation in (("without", False), ("with", True)):
        made = tiny.get_config("bert")
        made.data.source.path, made.data.cache_dir = str(write_text(tmp_path / "text")), str(tmp_path / "cache")
        made.train.steps, made.evaluate.every, made.checkpoint.every, made.trackers = 4, 2, 4, ()
        made.evaluate.samples = each_validation
        assert train(made, str(tmp_path / name)) == 0
        assert capsys.readouterr().err.count("the most confident words") == (2 if each_validation else 1)
        step, legend, *rows = (tmp_path / name / "samples.txt").read_text().splitlines()
        assert step == "step 4" and legend.startswith("the most confident words") and len(rows) >= 2
    whole, got = arrays(tmp_path / "without"), arrays(tmp_path / "with")
    assert whole.keys() == got.keys() and all((whole[name] == got[name]).all() for name in whole)
