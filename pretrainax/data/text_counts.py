"""Counts text in examples: tokens and bytes of the source text, targets that are text, and bytes of the targets.

Text excludes sentinels, EOS and [SEP]. Text metrics are therefore comparable between objectives. Metrics per byte are
also comparable between tokenizers, if the ids determine the text (`text_loss_reason`).
"""

from collections.abc import Sequence
from typing import Optional

import numpy as np

from pretrainax.data.batch import Example, predicts_tokens
from pretrainax.data.corpus import Corpus
from pretrainax.tokenization.base import TextTable, Tokenizer

# Pairs of strings with equal numbers of bytes that some tokenizers do not distinguish.
_ALIKE = (("A", "a"), ("\u00c9", "\u00e9"), ("a\nb", "a b"), ("a\tb", "a b"))
_CUT = 1e-4  # fraction of bytes: long documents (shards.BATCH) are tokenized in pieces, and each may get an added space


def text_loss_reason(tokenizer: Tokenizer, corpora: Sequence[Corpus]) -> str:
    """Returns the reason why the token ids of corpora do not determine their text; "" if they determine it."""
    vocabulary, table = tokenizer.vocabulary, tokenizer.text_table
    counts = np.sum([corpus.token_counts for corpus in corpora], axis=0)
    if vocabulary.unk is not None and counts[vocabulary.unk]:
        return f"{counts[vocabulary.unk]:,} tokens of the text are unknown to the tokenizer"
    for first, second in _ALIKE:
        ids, other_ids = (each.tolist() for each in tokenizer.encode_batch([first, second]))
        if ids == other_ids and vocabulary.unk not in ids:
            return f"the tokenizer does not distinguish {first!r} from {second!r}"
    text = sum(corpus.num_bytes for corpus in corpora)
    spelled = int(counts @ table.num_bytes) - table.adds_space * sum(corpus.num_documents for corpus in corpora)
    if not 0 <= spelled - text <= table.adds_space * _CUT * text:
        return f"the tokens spell {spelled:,} bytes, but the text has {text:,}"
    return ""


def bytes_per_spelled(table: TextTable, corpus: Corpus) -> float:
    """Returns the bytes of a corpus divided by the bytes that its token ids spell.

    A product with this ratio spreads added and lost bytes evenly over the corpus.
    """
    return corpus.num_bytes / max(int(corpus.token_counts @ table.num_bytes), 1)


class TextCounter:
    """Adds the arrays that count text to the examples of a corpus.

    Args:
      ratio: `bytes_per_spelled` of the corpus.
      separator: the id after each document.
      with_target_bytes: counts the bytes of targets. This requires that the loss is a likelihood of the text, and that
        the ids determine the text.
    """

    def __init__(self, table: TextTable, ratio: float, separator: Optional[int], with_target_bytes: bool):
        self._table, self._ratio, self._separator, self._with_target_bytes = table, ratio, separator, with_target_bytes

    def add_counts(self, example: Example, tokens: np.ndarray) -> Example:
        """Returns `example` with "text_weights" [N], "text_tokens" [], "text_bytes" [] and perhaps "target_bytes" [].

        Examples that predict no tokens get no "text_weights". tokens: the corpus tokens of the example, [raw].
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
