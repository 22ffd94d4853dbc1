"""Tests sentences.split: the ends of sentences, marks that end none, and that no text is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrainax.data.preparation.sentences import split


@pytest.mark.parametrize(
    "marked",
    [  # | marks the boundary of two sentences.
        "The man went to the store.| He bought a gallon of milk.",
        "Really?!| Yes!| Well... perhaps.",
        'She said: "I know."| Then she left.',
        '"Why?" he asked.| “Because.”| (So it is.)| Good.',
        "¿Qué?| ¡No!| «Sí.»| Fin.",
        "Он пришёл.| Она ушла.",
        "Two  spaces.|  A tab.|\tA line.|\nAnother one.",
        "A line may\nbreak anywhere.| So may\nthis one.",
        "A heading|\n\nA paragraph without an end| \n \nAnother",
        "Buy:|\n- milk|\n- bread|\n1. one|\n2. two",
        "白日依山尽，黄河入海流。|欲穷千里目，更上一层楼。",
        "他说：“真的吗？”|我笑了……没说话。|走！",
        "彼は来た。|「はい。」|私も行った．|円周率は３．１４だ。",
        "我走了.|他来了!|真的?|好",
        "Is this 東京?|はい。| It is.",
    ],
)
def test_ends(marked):
    assert "|".join(split(marked.replace("|", ""))) == marked


@pytest.mark.parametrize(
    "text",
    [
        "Dr. No met Mr. and Mrs. Smith at St. Paul's with Prof. Miller.",
        "J. R. R. Tolkien and George W. Bush never met.",
        "The U.S. Army, e.g. Gen. Grant, came at 5 p.m. Eastern time.",
        "Devlin et al. 2018, cf. Fig. 3 on pp. 12 and Vol. 4 of Sept. 2019.",
        "It costs 3.50 or 1,000.25 at example.com.",
        "Wait... what is that?",
        "Am 3. Oktober kam Hr. Meyer mit z.B. Bier, d.h. Nr. 5.",
        "M. Dupont et Mme. Curie.",
        "el Sr. García y la Dra. López",
        "no end at all",
        " \n ",
    ],
)
def test_no_end_inside(text):
    assert split(text) == [text]


def test_an_abbreviation_of_numbers_ends_a_sentence_before_words():
    assert split("No. I said No. 5.") == ["No.", " I said No. 5."]


def test_no_text_has_no_sentences():
    assert split("") == []


def test_white_space_at_the_end_belongs_to_the_last_sentence():
    assert split(" One. Two. \n\n") == [" One.", " Two. \n\n"]


@given(st.text(st.sampled_from("aA1 .!?…。！？．\n\"'“”()«»「」-•\t\u3000好no")) | st.text())
def test_nothing_is_lost(text):
    sentences = split(text)
    assert "".join(sentences) == text
    assert all(sentence.strip() for sentence in sentences[1:])


@pytest.mark.parametrize("kind", ["WordPiece", "ByteBPE", "Unigram", "Characters"])
def test_the_tokens_of_the_sentences_are_those_of_the_text(tokenizers_of_all_kinds, kind):
    tokenizer = tokenizers_of_all_kinds[kind]
    english = 'The man went to the store. He bought a gallon of milk.\n\nShe said: "I know."  In 1665, an apple fell.'
    chinese = "床前明月光，疑是地上霜。举头望明月，低头思故乡。\n白日依山尽，黄河入海流。"
    for text in (english, chinese):
        sentences = split(text)
        assert len(sentences) >= 3
        np.testing.assert_array_equal(np.concatenate(tokenizer.encode_batch(sentences)), tokenizer.encode(text))
