"""Finds where sentences end: with spaces, as in the Latin and Cyrillic scripts, and without, as in Chinese and
Japanese.

Rules, and no model: a mark of the end, what follows it, and what stands before it. In doubt two sentences stay one,
since half a sentence is the worse mistake for a model that learns from pairs of them.
"""

import re

_OPENERS = "\"'“‘„‚«‹([{¿¡「『（《〈【"
_CLOSERS = "\"'”’»›)\\]}」』）》〉】"
_WITHOUT_SPACES = "\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff00-\uffef"  # Chinese and Japanese

_END = re.compile(
    rf"(?<![.!?…])[.!?…]+[{_CLOSERS}]*(?=\s)"
    rf"|(?<![.!?…])[.!?]+[{_CLOSERS}]*(?=[{_WITHOUT_SPACES}])"
    rf"|(?:[。！？｡]+|．(?!\d))[{_CLOSERS}]*"
    # before an empty line or an item of a list, whatever the line ends with
    r"|\S(?=[^\S\n]*\n\s*(?:\n|[-*•]\s|\d{1,2}[.)]\s))"
)
_PARAGRAPH = re.compile(r"[^\S\n]*\n\s*\n")
_NEXT = re.compile(rf"\s*[{re.escape(_OPENERS)}]*(\S)")

# Words with a period that ends no sentence, in English, German, French, Spanish, Portuguese and Italian: before a name
# or a noun, and before a number.
_BEFORE_NAMES = (
    "Adm Capt Cmdr Col Cpl Dr Drs Fr Gen Gov Hon Lt Maj Messrs Mr Mrs Ms Mx Prof Rep Rev Sen Sgt Sr St Ste Supt "
    "Hr Hrn Mgr Mlle Mme Mmes Dra Sra Srta Sto Sta Ud Uds Gral Lic Exmo Dott Dssa Sig "
    "al approx cf viz vs bzw ca evtl ggf inkl sog vgl"
)
_BEFORE_NUMBERS = (
    "Jan Feb Mar Apr Jun Jul Aug Sep Sept Oct Nov Dec "
    "Abb Art Bd Cap Ch Chap Ed Eq Eqs Est Env Fig Figs Kap No Nos Nr Op Pp Pt Sec Vol Vols"
)
_WORDS, _NUMBER_WORDS = (f"(?i:{'|'.join(words.split())})" for words in (_BEFORE_NAMES, _BEFORE_NUMBERS))
# Also an initial or a letter of a list (J. B.), letters with periods between them (e.g, U.S, z.B, Ph.D), the number of
# an item, or of a day in German (3. Oktober).
_LETTERS = r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,3}|[^\W\d_]|\d{1,2}"
_NO_END = re.compile(rf"(?<![\w.])(?:{_LETTERS}|{_WORDS})\Z")
_NO_END_BEFORE_NUMBERS = re.compile(rf"(?<!\w){_NUMBER_WORDS}\Z")
_FARTHEST = 12  # characters before a period that are looked at


def split(text: str) -> list[str]:
    """Returns the sentences of a text. Joined, they are the text.

    White space belongs to the sentence that it precedes, as in the tokens of byte pairs and of SentencePiece, and at
    the end of the text to the last one. A line's end is white space; empty lines and items of lists are borders.

        Dr. No came. "Why?" he asked.   ->  [Dr. No came.] [ "Why?" he asked.]
        你好！我来了。                    ->  [你好！] [我来了。]
    """
    sentences, start = [], 0
    for mark in _END.finditer(text):
        if _is_end(text, mark):
            sentences.append(text[start : mark.end()])
            start = mark.end()
    rest = text[start:]
    if sentences and not rest.strip():
        sentences[-1] += rest
    elif rest:
        sentences.append(rest)
    return sentences


def _is_end(text: str, mark: re.Match) -> bool:
    following = _NEXT.match(text, mark.end())
    if following is None or mark[0][0] not in ".!?…" or _PARAGRAPH.match(text, mark.end()):
        return True
    if following[1].islower():
        return False
    if mark[0][0] != "." or mark[0][1:2] == ".":
        return True
    before = max(mark.start() - _FARTHEST, 0), mark.start()
    if following[1].isdigit() and _NO_END_BEFORE_NUMBERS.search(text, *before):
        return False
    return not _NO_END.search(text, *before)
