"""Counts the text in examples: the tokens and bytes of the source text, the targets that are text, and their bytes.

Text excludes sentinels, EOS and [SEP]. Text metrics are therefore comparable between objectives. Metrics per byte are
also comparable between tokenizers, if the token ids determine the text (`text_loss_reason`).
"""

from collections.abc import Sequence

import numpy as np

from pretrainax.data.batch import TOKEN_FIELDS, Example, predicts_tokens
from pretrainax.data.corpus import Corpus
from pretrainax.tokenization.base import TextTable, Tokenizer, Vocabulary

# Pairs of strings with equal numbers of bytes that some tokenizers do not distinguish.
_SIMILAR_STRINGS = (("A", "a"), ("\u00c9", "\u00e9"), ("a\nb", "a b"), ("a\tb", "a b"))
_MAX_ADDED_SPACES = 1e-4  # per byte: long documents (shards.BATCH) are tokenized in pieces, each with an added space


def text_loss_reason(tokenizer: Tokenizer, corpora: Sequence[Corpus]) -> str:
    """Returns why the token ids of the corpora do not determine their text, or "" if they do."""
    vocabulary, table = tokenizer.vocabulary, tokenizer.text_table
    counts = np.sum([corpus.token_counts for corpus in corpora], axis=0)
    if vocabulary.unk is not None and counts[vocabulary.unk]:
        return f"{counts[vocabulary.unk]:,} tokens of the text are unknown to the tokenizer"
    for first, second in _SIMILAR_STRINGS:
        ids, other_ids = (encoding.tolist() for encoding in tokenizer.encode_batch([first, second]))
        if ids == other_ids and vocabulary.unk not in ids:
            return f"the tokenizer does not distinguish {first!r} from {second!r}"
    text_bytes = sum(corpus.num_bytes for corpus in corpora)
    spelled_bytes = int(counts @ table.num_bytes) - table.adds_space * sum(corpus.num_documents for corpus in corpora)
    if not 0 <= spelled_bytes - text_bytes <= table.adds_space * _MAX_ADDED_SPACES * text_bytes:
        return f"the tokens spell {spelled_bytes:,} bytes, but the text has {text_bytes:,}"
    return ""


def bytes_per_spelled(table: TextTable, corpus: Corpus) -> float:
    """Returns the ratio of a corpus's size in bytes to the number of bytes that its token ids spell.

    Multiplying the spelled bytes of an example by this ratio spreads the bytes that the tokenizer added or lost evenly
    over the corpus.
    """
    return corpus.num_bytes / max(int(corpus.token_counts @ table.num_bytes), 1)


class TextCounter:
    """Adds arrays that count text to the examples of a corpus.

    Args:
      table: for each token id, the number of bytes that it spells and whether it is text.
      ratio: `bytes_per_spelled` of the corpus.
      vocabulary: the vocabulary of the tokenizer.
      with_target_bytes: whether to count the bytes of targets. This requires that the loss is a likelihood of the text
        and that the token ids determine the text.
    """

    def __init__(self, table: TextTable, ratio: float, vocabulary: Vocabulary, with_target_bytes: bool):
        self._table, self._ratio, self._with_target_bytes = table, ratio, with_target_bytes
        self._mask, self._separator = vocabulary.mask, vocabulary.separator

    def add_counts(self, example: Example, tokens: np.ndarray) -> Example:
        """Returns `example` with the arrays "text_weights" [N], "text_tokens" and "text_bytes" added.

        If the counter was created with `with_target_bytes`, "target_bytes" is added too. All but "text_weights" are
        scalars. An example that predicts no tokens gets neither "text_weights" nor "target_bytes".

        Only text that the model reads is counted: a task cuts long records, and a decoder does not read its last
        target. [MASK] counts as the token in its place.

        tokens: the corpus tokens of the example, [raw].
        """
        is_text, num_bytes, adds_space = self._table
        inputs = [example[name] for name in TOKEN_FIELDS if name in example]
        read = sum(np.count_nonzero(is_text[ids] | (ids == self._mask)) for ids in inputs)
        text = tokens[is_text[tokens]][:read]
        spelled_bytes = int(num_bytes[text].sum())
        counts = {
            "text_tokens": np.array(len(text), np.int32),
            "text_bytes": np.array(round(spelled_bytes * self._ratio), np.int32),
        }
        if not predicts_tokens(example):
            return {**example, **counts}
        targets, weights = example["targets"], example["loss_weights"]
        counts = {"text_weights": weights * is_text[targets], **counts}
        if self._with_target_bytes:
            target_sizes = num_bytes[targets]
            if adds_space:
                target_sizes = target_sizes - ((example["tokens"] == self._separator) & is_text[targets])
            counts["target_bytes"] = np.array((weights * target_sizes).sum(), np.float32)
        return {**example, **counts}
