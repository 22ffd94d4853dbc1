"""Splits text into sentences, in scripts with spaces (Latin, Cyrillic) and without spaces (Chinese, Japanese).

The rules look at the mark that may end a sentence (such as a period) and at the text before and after it. If they are
inconclusive, the text is not split there: for a model that trains on sentence pairs, half a sentence is worse than two
sentences joined together.
"""

import re

_OPENING_MARKS = "\"'“‘„‚«‹([{¿¡「『（《〈【"
_CLOSING_MARKS = "\"'”’»›)\\]}」』）》〉】"
_CJK = "\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff00-\uffef"  # Chinese and Japanese

_END_MARK = re.compile(
    rf"(?<![.!?…])[.!?…]+[{_CLOSING_MARKS}]*(?=\s)"
    rf"|(?<![.!?…])[.!?]+[{_CLOSING_MARKS}]*(?=[{_CJK}])"
    rf"|(?:[。！？｡]+|．(?!\d))[{_CLOSING_MARKS}]*"
    # The last character before a blank line or a list item.
    r"|\S(?=[^\S\n]*\n\s*(?:\n|[-*•]\s|\d{1,2}[.)]\s))"
)
_PARAGRAPH = re.compile(r"[^\S\n]*\n\s*\n")
_NEXT_CHARACTER = re.compile(rf"\s*[{re.escape(_OPENING_MARKS)}]*(\S)")

# Abbreviations whose period does not end a sentence, in English, German, French, Spanish, Portuguese and Italian. The
# first list contains abbreviations before a name or a noun, the second list abbreviations before a number.
_BEFORE_NAMES = (
    "Adm Capt Cmdr Col Cpl Dr Drs Fr Gen Gov Hon Lt Maj Messrs Mr Mrs Ms Mx Prof Rep Rev Sen Sgt Sr St Ste Supt "
    "Hr Hrn Mgr Mlle Mme Mmes Dra Sra Srta Sto Sta Ud Uds Gral Lic Exmo Dott Dssa Sig "
    "al approx cf viz vs bzw ca evtl ggf inkl sog vgl"
)
_BEFORE_NUMBERS = (
    "Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec "
    "Abb Art Bd Cap Ch Chap Ed Eq Eqs Est Env Fig Figs Kap No Nos Nr Op Pp Pt Sec Vol Vols"
)
_NAME_ABBREVIATIONS, _NUMBER_ABBREVIATIONS = (
    f"(?i:{'|'.join(words.split())})" for words in (_BEFORE_NAMES, _BEFORE_NUMBERS)
)
# A period also does not end a sentence after an initial or a list letter (J. B.), an abbreviation with inner periods
# (e.g, U.S, z.B, Ph.D), the number of a list item, or a German ordinal (3. Oktober).
_LETTERS = r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,3}|[^\W\d_]|\d{1,2}"
_ABBREVIATION = re.compile(rf"(?<![\w.])(?:{_LETTERS}|{_NAME_ABBREVIATIONS})\Z")
_ABBREVIATION_BEFORE_NUMBERS = re.compile(rf"(?<!\w){_NUMBER_ABBREVIATIONS}\Z")
_CONTEXT_LENGTH = 12  # number of characters before a period that the rules read


def split(text: str) -> list[str]:
    """Splits a text into sentences, whose concatenation is the text.

    Whitespace belongs to the sentence that follows it, as in the tokens of byte-level BPE and SentencePiece, except
    that trailing whitespace belongs to the last sentence. A single newline is whitespace; sentences also end at blank
    lines and list items.

        Dr. No came. "Why?" he asked.   ->  [Dr. No came.] [ "Why?" he asked.]
        你好！我来了。                    ->  [你好！] [我来了。]
    """
    sentences, start = [], 0
    for mark in _END_MARK.finditer(text):
        if _is_sentence_end(text, mark):
            sentences.append(text[start : mark.end()])
            start = mark.end()
    remaining_text = text[start:]
    if sentences and not remaining_text.strip():
        sentences[-1] += remaining_text
    elif remaining_text:
        sentences.append(remaining_text)
    return sentences


def _is_sentence_end(text: str, mark: re.Match) -> bool:
    """Returns True if `mark`, a match of `_END_MARK` in `text`, ends a sentence."""
    following = _NEXT_CHARACTER.match(text, mark.end())
    if following is None or mark[0][0] not in ".!?…" or _PARAGRAPH.match(text, mark.end()):
        return True
    if following[1].islower():
        return False
    if mark[0][0] != "." or mark[0][1:2] == ".":
        return True
    context_range = max(mark.start() - _CONTEXT_LENGTH, 0), mark.start()
    if following[1].isdigit() and _ABBREVIATION_BEFORE_NUMBERS.search(text, *context_range):
        return False
    return not _ABBREVIATION.search(text, *context_range)
