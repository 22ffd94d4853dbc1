"""Each invalid value in a request gives an error of one clear line."""

import pytest

from pretrainax.config import UserError
from pretrainax.inference.request import Sampling

WRONG = [
    (dict(max_new_tokens=0), "max_new_tokens is 0, it must be a whole number from 1"),
    (dict(max_new_tokens=2.5), "max_new_tokens is 2.5, it must be a whole number from 1"),
    (dict(temperature=-0.1), "temperature is -0.1, it must be 0 (always the likeliest token) or above"),
    (dict(temperature=float("nan")), "temperature is nan, it must be 0"),
    (dict(temperature="hot"), "temperature is 'hot', it must be 0"),
    (dict(temperature=None), "temperature is None, it must be 0"),
    (dict(top_k=0, temperature=1.0), "top_k is 0, it must be a whole number from 1"),
    (dict(top_p=0.0, temperature=1.0), "top_p is 0.0, it must be above 0 and at most 1"),
    (dict(top_p=1.5, temperature=1.0), "top_p is 1.5, it must be above 0 and at most 1"),
    (dict(min_p=-1.0, temperature=1.0), "min_p is -1.0, it must be above 0 and at most 1"),
    (dict(typical_p=2, temperature=1.0), "typical_p is 2, it must be above 0 and at most 1"),
    (dict(repetition_penalty=0.0), "repetition_penalty is 0.0, it must be above 0 (1: no penalty)"),
    (dict(frequency_penalty=float("inf")), "frequency_penalty is inf, it must be a number"),
    (dict(presence_penalty=True), "presence_penalty is True, it must be a number"),
    (dict(num_beams=0), "num_beams is 0, it must be a whole number from 1"),
    (dict(length_penalty=float("nan")), "length_penalty is nan, it must be a number"),
    (dict(num_return=0), "num_return is 0, it must be a whole number from 1"),
    (dict(seed=-1), "seed is -1, it must be a whole number from 0 to 4294967295"),
    (dict(seed=1 << 32), "seed is 4294967296, it must be a whole number from 0 to 4294967295"),
    (dict(seed=1 << 33), "seed is 8589934592, it must be a whole number from 0 to 4294967295"),
    (dict(stop="\n"), "stop is '\\n', it must be a tuple of strings that are not empty"),
    (dict(stop=("",)), "stop is ('',), it must be a tuple of strings that are not empty"),
    (dict(allowed_tokens=(-1,)), "allowed_tokens is (-1,), it must be a tuple of ids and strings"),
    (dict(banned_tokens=(1.5,)), "banned_tokens is (1.5,), it must be a tuple of ids and strings"),
    (dict(banned_strings=(3,)), "banned_strings is (3,), it must be a tuple of strings that are not empty"),
    (dict(regex=""), "regex is '', it must be a regular expression"),
    (dict(top_k=5), "top_k is 5 and temperature 0, which is greedy: set temperature above 0"),
    (dict(num_beams=4, temperature=1.0), "num_beams is 4 and temperature 1.0: beam search does not sample"),
    (dict(length_penalty=2.0), "length_penalty is 2.0 and num_beams 1: set num_beams above 1"),
    (dict(num_beams=2, num_return=3), "num_return is 3, it must be at most num_beams, 2"),
    (dict(num_return=3), "num_return is 3 and all would be equal: set temperature above 0, or num_beams"),
    (dict(max_length=0), "max_length is 0, it must be a whole number from 1"),
    (dict(min_new_tokens=5, max_new_tokens=4), "min_new_tokens is 5, it must be at most max_new_tokens, 4"),
    (dict(no_repeat_ngram_size=0), "no_repeat_ngram_size is 0, it must be a whole number from 1"),
    (dict(early_stopping="always", num_beams=2), "early_stopping is 'always', it must be True, False or 'never'"),
    (dict(early_stopping=1, num_beams=2), "early_stopping is 1, it must be True, False or 'never'"),
    (dict(early_stopping=True), "early_stopping is True and num_beams 1: set num_beams above 1"),
    (dict(renormalize_logits=True), "renormalize_logits is True and num_beams 1: set num_beams above 1"),
    (dict(eta_cutoff=0.5), "eta_cutoff is 0.5 and temperature 0, which is greedy: set temperature above 0"),
    (dict(banned_sequences=((),)), "banned_sequences is ((),), it must be a tuple of tuples of ids"),
    (dict(forced_bos_token_id=-1), "forced_bos_token_id is -1, it must be an id"),
    (dict(forced_eos_token_id=2), "forced_eos_token_id is 2, it must be a tuple of ids"),
    (dict(forced_eos_token_id=(5,), banned_tokens=(5,)), "forced_eos_token_id is 5, which banned_tokens has"),
]


@pytest.mark.parametrize("options, message", WRONG, ids=lambda value: str(value)[:40])
def test_a_value_out_of_range_is_one_line(options, message):
    with pytest.raises(UserError) as caught:
        Sampling(**options).check()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(UserError, match="top_p is 2.0.*; seed is -1"):
        Sampling(temperature=1.0, top_p=2.0, seed=-1).check()


@pytest.mark.parametrize(
    "options",
    [{}, dict(temperature=1, top_p=1, top_k=3, seed=5), dict(num_beams=4, num_return=4), dict(seed=(1 << 32) - 1)],
)
def test_what_is_in_range_is_taken(options):
    assert list(Sampling(**options).problems()) == []
