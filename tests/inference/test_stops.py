"""Stop strings end a text, even if they span several tokens."""

from pretrainax.inference.stops import find_stop, settled, stopped_after

PIECES = ["one", ".\n", "\nQ", ": t", "wo", "\n\n", "end"]


def text_of(ids):
    return "".join(PIECES[i] for i in ids)


def test_a_stop_is_found_across_tokens_at_the_token_that_completes_it():
    ids = range(len(PIECES))
    assert stopped_after(ids, 0, text_of, ["\n\nQ:"]) == 4
    assert stopped_after(ids, 3, text_of, ["\n\nQ:"]) == 4
    assert stopped_after(ids, 0, text_of, ["\n\nQ:", "\n\n"]) == 3
    assert stopped_after(ids, 0, text_of, ["two\n\ne"]) == 7
    assert stopped_after(ids[:6], 0, text_of, ["two\n\ne"]) == 0
    assert stopped_after(ids, 0, text_of, []) == 0


def test_a_text_is_cut_where_the_first_stop_begins():
    assert find_stop("ab cd", ["d", "b "]) == 1 and find_stop("ab cd", ["x"]) is None


def test_what_may_become_a_stop_or_a_character_is_not_shown_yet():
    assert settled("one.\n", ["\n\nQ"]) == "one."
    assert settled("one.\n\n", ["\n\nQ", ".\n\nA"]) == "one"
    assert settled("one.\n\nR", ["\n\nQ"]) == "one.\n\nR"
    assert settled("caf\ufffd", []) == "caf"
