"""Tests the view of a row, in the terminal and on the page: it marks how the objective changed each token."""

import numpy as np

from pretrainax.data.inspection import page
from pretrainax.data.inspection.check import Group, Measurement
from pretrainax.data.inspection.row_view import Panel, Piece, TokenTexts, View, view
from pretrainax.data.inspection.terminal import render, table
from pretrainax.data.objectives import Statistic
from pretrainax.tokenization.base import Vocabulary
from tests.support.pages import Tags

WORDS = [" my", " dog", " is", " hairy", " cat", "\n"]
SPECIAL = {0: "<pad>", 1: "<unk>", 2: "[SEP]", 3: "[CLS]", 4: "[MASK]", 5: "<x>", 6: "<y>"}


class FakeTokenizer:
    vocabulary = Vocabulary(size=13, pad=0, unk=1, sep=2, cls=3, mask=4, sentinels=(5, 6))
    special_pieces = SPECIAL

    def spellings(self):
        return [b""] * 7 + [word.encode() for word in WORDS]


words = TokenTexts(FakeTokenizer())
MY, DOG, IS, HAIRY, CAT, BREAK = range(7, 13)


def masked_row(**more):
    return {
        "tokens": np.array([3, MY, 4, CAT, HAIRY, 2, 0, 0]),
        "segment_ids": np.array([1, 1, 1, 1, 1, 1, 0, 0]),
        "masked_positions": np.array([2, 3, 4, 0]),
        "targets": np.array([DOG, IS, HAIRY, 0]),
        "loss_weights": np.array([1, 1, 1, 0], np.float32),
        **more,
    }


class EvilTokenizer(FakeTokenizer):
    def spellings(self):
        return [b""] * 7 + [b" my", b"\x1b[2J", b" \xc2\x9b31m", "\u202e".encode(), b"\x07", b"\n"]


def test_text_that_commands_a_terminal_is_seen_there_and_on_the_page():
    row = {
        "tokens": np.array([MY, DOG, IS, HAIRY, CAT]),
        "segment_ids": np.ones(5, int),
        "targets": np.array([DOG, IS, HAIRY, CAT, MY]),
        "loss_weights": np.ones(5, np.float32),
    }
    shown = view(row, TokenTexts(EvilTokenizer()))
    measured = Measurement([], 1, [], np.ones(1), {})
    for text in (render(shown, colours=False, width=80), page.render("config", "summary", measured, [shown])):
        assert "␛[2J" in text and not set("\x1b\x9b\u202e\x07") & set(text)


def test_masked_random_and_kept_words():
    reads, predicts = view(masked_row(), words).panels
    assert reads.pieces == [
        Piece("[CLS]", "special", 1),
        Piece(" my", "text", 1),
        Piece(" [MASK]", "masked", 1, "dog"),
        Piece(" cat", "random", 1, "is"),
        Piece(" hairy", "kept", 1, "hairy"),
        Piece("[SEP]", "special", 1),
        Piece("", "padding", 2),
    ]
    assert [piece.text for piece in predicts.pieces] == ["dog is hairy"]


def test_a_random_word_stands_apart_as_the_right_one():
    row = masked_row(tokens=np.array([3, MY, 4, BREAK, HAIRY, 2, 0, 0]))
    assert view(row, words).panels[0].pieces[3] == Piece(" ⏎", "random", 1, "is")


def test_every_token_is_in_one_piece():
    for side in view(masked_row(), words).panels[:1]:
        assert sum(piece.tokens for piece in side.pieces) == 8


def test_plain_marks():
    lines = render(view(masked_row(), words, "row 0"), colours=False, width=100).splitlines()
    assert lines[:3] == ["row 0", "  reads", "    [CLS] my [MASK→dog] [cat→is] [=hairy][SEP] [2 padding]"]


def test_colours():
    text = render(view(masked_row(), words), colours=True, width=100)
    assert "\x1b[4;1;33mdog\x1b[0m" in text and "MASK" not in text


def test_sentence_pairs_have_two_parts_and_no_new_document():
    types = np.array([0, 0, 0, 1, 1, 1, 0, 0])
    made = view(masked_row(token_types=types, pair_labels=np.array(1)), words)
    assert [piece.part for piece in made.panels[0].pieces] == ["A", "A", "A", "B", "B", "B", ""]
    assert made.notes == ["pair label 1"]
    assert not any(piece.new for piece in made.panels[0].pieces)


def test_words_have_labels_without_their_padding():
    row = masked_row(words=np.array([0, 1, 2, 2, 3, 0, 0, 0]), word_labels=np.array([4, 0, 5, 0, 0, 0, 0, 0]))
    assert view(row, words).notes == ["words [0, 1, 2, 2, 3, 0]", "their labels [4, 0, 5]"]


def decoder_row(tokens, segments, **more):
    tokens, segments = np.array(tokens), np.array(segments)
    ones = np.ones(len(tokens), np.float32)
    return {"tokens": tokens, "segment_ids": segments, "targets": tokens, "loss_weights": ones, **more}


def test_documents_begin_at_a_segment_and_behind_a_separator():
    by_segment = view(decoder_row([MY, DOG, IS], [1, 1, 2]), words).panels[0].pieces
    assert [(piece.text, piece.new) for piece in by_segment] == [(" my dog", False), (" is", True)]
    by_token = view(decoder_row([MY, 2, IS], [1, 1, 1]), words).panels[0].pieces
    assert [(piece.text, piece.new) for piece in by_token] == [(" my", False), ("[SEP]", False), (" is", True)]


def test_a_separator_that_starts_a_decoder_ends_no_document():
    pieces = view(decoder_row([2, MY, 2, DOG], [1, 1, 2, 2]), words).panels[0].pieces  # BART's decoder row
    assert [piece.new for piece in pieces] == [False, False, True, False]


def test_prefix_and_targets_without_loss():
    row = decoder_row([MY, DOG, IS], [1, 1, 1], prefix_mask=np.array([1, 1, 0]))
    row["loss_weights"] = np.array([0, 1, 1], np.float32)
    reads, predicts = view(row, words).panels
    assert [(piece.text, piece.part) for piece in reads.pieces] == [(" my dog", "prefix"), (" is", "")]
    assert [piece.dim for piece in predicts.pieces] == [True, False]


def test_sentinels_of_both_sides():
    row = decoder_row([0, 5, DOG], [1, 1, 1], targets=np.array([5, DOG, 6]))
    encoder = {"encoder_tokens": np.array([MY, 5, 1]), "encoder_segment_ids": np.array([1, 1, 1])}
    sides = view(row | encoder, words).panels
    assert [side.name for side in sides] == ["encoder reads", "decoder reads", "predicts"]
    assert [piece.kind for piece in sides[0].pieces] == ["text", "sentinel", "unknown"]
    assert sides[1].pieces[0].kind == "special"  # The start token, whose id is that for padding.


def test_a_long_row_is_cut_in_the_terminal_and_says_so():
    row = decoder_row([MY] * 1000, [1] * 1000)
    assert "… 760 tokens more" in render(view(row, words), colours=False, width=80)


def test_white_space_is_seen():
    row = decoder_row([MY, BREAK, DOG], [1, 1, 1])
    assert view(row, words).panels[0].pieces[0].text == " my⏎ dog"


# --- the table and the page ---------------------------------------------------------------------------------------


def measured(*statistics):
    figures = [Statistic("padding", 0.25), Statistic("rows without loss", 0.0, 0.0, 0.01)]
    return Measurement(
        [Group("MaskedLM", [], list(statistics))], 4, figures, np.array([0.5, 1.0]), {"documents cut": 3}
    )


def test_the_table_tells_what_is_off():
    lines = table(measured(Statistic("mask rate", 0.3, 0.15, 0.01), Statistic("kept", 0.1, 0.1, 0.01))).splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == ["OFF", "ok"]
    assert any("documents cut" in line and line.split()[-1] == "3" for line in lines)
    assert any("25.00%" in line for line in lines)


def test_the_page_holds_all_and_loads_nothing():
    shown = view(masked_row(), words, "row 0")
    made = page.render("bert", "train 1 document", measured(Statistic("mask rate", 0.3, 0.15, 0.01)), [shown])
    tags = Tags(made)
    assert not {"script", "link", "img", "iframe"} & set(tags.tags)
    assert "svg" in tags.tags and "url(" not in made and "@import" not in made
    assert not any("://" in value for value in tags.values)
    assert {"masked", "random", "kept", "special", "padding"} <= set(tags.values)
    assert "sentinel" not in tags.values  # the legend lists only kinds that occur
    assert "✗ off" in tags.text and "cat" in tags.text


def test_text_is_no_markup():
    pieces = [Piece("<script>alert(1)</script>", "text", 1), Piece("<b>", "masked", 1, '"<i>&')]
    made = page.render("<u>", "&", measured(), [View("<a>", [Panel("<s>", pieces)], ["<p>"])])
    assert not {"script", "a", "u"} & set(Tags(made).tags)
    assert "<script>alert(1)</script>" in Tags(made).text and '"<i>&' in Tags(made).text
