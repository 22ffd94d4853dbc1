"""Subword tokenizers: what is trained or loaded, as configs name it."""

from pretrainax.tokenization.choices import (
    BPE,
    ByteBPE,
    Characters,
    PretrainedTokenizer,
    TokenizerConfig,
    Unigram,
    WordPiece,
)

__all__ = ["TokenizerConfig", "Unigram", "BPE", "WordPiece", "ByteBPE", "Characters", "PretrainedTokenizer"]
