"""Contains the tokenizers that a config can train or load."""

from pretrainax.tokenization.characters import Characters
from pretrainax.tokenization.choices import TokenizerConfig
from pretrainax.tokenization.huggingface import PretrainedTokenizer
from pretrainax.tokenization.sentencepiece import BPE, Unigram
from pretrainax.tokenization.subwords import ByteBPE, WordPiece
from pretrainax.tokenization.words import Words

__all__ = ["TokenizerConfig", "Unigram", "BPE", "WordPiece", "ByteBPE", "Characters", "Words", "PretrainedTokenizer"]
