"""Splits text into sentences, in scripts with spaces (Latin, Cyrillic) and without spaces (Chinese, Japanese).

The splitter has rules for the end mark of a sentence (such as a period), the text after the mark and the text before
the mark. If the rules are uncertain, the text is not split, because for a model that learns from sentence pairs half a
sentence is worse than two sentences in one.
"""

import re

_OPENERS = "\"'“‘„‚«‹([{¿¡「『（《〈【"
_CLOSERS = "\"'”’»›)\\]}」』）》〉】"
_WITHOUT_SPACES = "\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff00-\uffef"  # Chinese and Japanese

_END = re.compile(
    rf"(?<![.!?…])[.!?…]+[{_CLOSERS}]*(?=\s)"
    rf"|(?<![.!?…])[.!?]+[{_CLOSERS}]*(?=[{_WITHOUT_SPACES}])"
    rf"|(?:[。！？｡]+|．(?!\d))[{_CLOSERS}]*"
    # any character before an empty line or a list item
    r"|\S(?=[^\S\n]*\n\s*(?:\n|[-*•]\s|\d{1,2}[.)]\s))"
)
_PARAGRAPH = re.compile(r"[^\S\n]*\n\s*\n")
_NEXT = re.compile(rf"\s*[{re.escape(_OPENERS)}]*(\S)")

# Abbreviations whose period does not end a sentence, in English, German, French, Spanish, Portuguese and Italian. The
# first list is for abbreviations before a name or a noun, the second list for abbreviations before a number.
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
# The period also does not end a sentence after an initial or a list letter (J. B.), letters with periods between them
# (e.g, U.S, z.B, Ph.D), the number of a list item, or a German ordinal (3. Oktober).
_LETTERS = r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,3}|[^\W\d_]|\d{1,2}"
_NO_END = re.compile(rf"(?<![\w.])(?:{_LETTERS}|{_WORDS})\Z")
_NO_END_BEFORE_NUMBERS = re.compile(rf"(?<!\w){_NUMBER_WORDS}\Z")
_CONTEXT = 12  # number of characters before a period that the rules use


def split(text: str) -> list[str]:
    """Splits a text into sentences. The concatenation of the sentences is the text.

    White space belongs to the following sentence, as in the tokens of byte-level BPE and SentencePiece. White space at
    the end of the text belongs to the last sentence. A single newline is whitespace. Blank lines and list items are
    sentence boundaries.

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
    before = max(mark.start() - _CONTEXT, 0), mark.start()
    if following[1].isdigit() and _NO_END_BEFORE_NUMBERS.search(text, *before):
        return False
    return not _NO_END.search(text, *before)
