"""Counts text in examples: what they are made of, which targets are text, and how many bytes these have.

Text is what a tokenizer makes of text: no sentinel, no end, no [SEP]. So figures of it compare between objectives, and
per byte between tokenizers, where the ids tell all of it: `lost_text`.
"""

from collections.abc import Sequence
from typing import Optional

import numpy as np

from pretrainax.data.batch import Example, predicts_tokens
from pretrainax.data.corpus import Corpus
from pretrainax.tokenization.base import TextTable, Tokenizer

# Texts of as many bytes, which tokenizers are known to take for each other.
_ALIKE = (("A", "a"), ("\u00c9", "\u00e9"), ("a\nb", "a b"), ("a\tb", "a b"))
_CUT = 1e-4  # of the bytes: texts above shards.BATCH are tokenized in pieces, each perhaps with a space before it


def lost_text(tokenizer: Tokenizer, corpora: Sequence[Corpus]) -> str:
    """Returns what the ids of corpora do not tell of their text, as the end of a line; "" where they tell all of it."""
    vocabulary, table = tokenizer.vocabulary, tokenizer.text_table
    counts = np.sum([corpus.token_counts for corpus in corpora], axis=0)
    if vocabulary.unk is not None and counts[vocabulary.unk]:
        return f"{counts[vocabulary.unk]:,} tokens of the text are unknown to the tokenizer"
    for one, other in _ALIKE:
        ids, same = (each.tolist() for each in tokenizer.encode_batch([one, other]))
        if ids == same and vocabulary.unk not in ids:
            return f"the tokenizer does not tell {one!r} from {other!r}"
    text = sum(corpus.num_bytes for corpus in corpora)
    spelled = int(counts @ table.num_bytes) - table.adds_space * sum(corpus.num_documents for corpus in corpora)
    if not 0 <= spelled - text <= table.adds_space * _CUT * text:
        return f"the tokens spell {spelled:,} bytes of a text that has {text:,}"
    return ""


def bytes_per_spelled(table: TextTable, corpus: Corpus) -> float:
    """Returns bytes of a corpus by those that its ids spell: spreads over it what a tokenizer adds and leaves out."""
    return corpus.num_bytes / max(int(corpus.token_counts @ table.num_bytes), 1)


class TextCounter:
    """Adds to the examples of a corpus the arrays of a batch that count text.

    Args:
      ratio: `bytes_per_spelled` of the corpus.
      separator: the id after each document.
      with_target_bytes: the loss is a likelihood of the text, and the ids tell all of it.
    """

    def __init__(self, table: TextTable, ratio: float, separator: Optional[int], with_target_bytes: bool):
        self._table, self._ratio, self._separator, self._with_target_bytes = table, ratio, separator, with_target_bytes

    def counted(self, example: Example, tokens: np.ndarray) -> Example:
        """Returns `example` with "text_weights" [N], "text_tokens" [], "text_bytes" [] and perhaps "target_bytes" [].
        Where no tokens are predicted, there are no weights.

        tokens: of the text that it is made of, [raw].
        """
        is_text, num_bytes, adds_space = self._table
        spelled = int(num_bytes[tokens].sum())
        counts = {
            "text_tokens": np.array(np.count_nonzero(is_text[tokens]), np.int32),
            "text_bytes": np.array(round(spelled * self._ratio), np.int32),
        }
        if not predicts_tokens(example):
            return {**example, **counts}
        targets, weights = example["targets"], example["loss_weights"]
        counts = {"text_weights": weights * is_text[targets], **counts}
        if self._with_target_bytes:
            sizes = num_bytes[targets]
            if adds_space:
                sizes = sizes - ((example["tokens"] == self._separator) & is_text[targets])
            counts["target_bytes"] = np.array((weights * sizes).sum(), np.float32)
        return {**example, **counts}
