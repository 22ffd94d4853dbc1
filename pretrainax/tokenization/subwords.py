"""Implements tokenizers of the `tokenizers` library (tokenizer.json), and trains WordPiece and byte-level BPE."""

import collections
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Optional

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pretrainax.config import Experiment, UserError
from pretrainax.tokenization.base import Tokenizer, Vocabulary
from pretrainax.tokenization.choices import TokenizerConfig, special_piece_problems, too_little_text
from pretrainax.tokenization.growth import check_growth
from pretrainax.tokenization.sentencepiece import piece_bytes

_RARE_CHARACTERS = "\U0002a6d6 \ua66e \u0f3a"  # characters that few vocabularies contain


class SubwordTokenizer(Tokenizer):
    """A tokenizer that runs a tokenizer.json in the `tokenizers` library: WordPiece, byte-level BPE, Unigram, …"""

    file = "tokenizer.json"

    def __init__(self, model: bytes, vocabulary: Vocabulary, special_pieces: dict[int, str]):
        decisive = decisive_part(model, vocabulary)
        super().__init__(model, vocabulary, special_pieces, decisive.encode())
        check_growth(json.loads(decisive))
        self._tokenizer = tokenizers.Tokenizer.from_str(decisive)
        self._tokenizer.encode_special_tokens = True  # encodes "[MASK]" in a text as ordinary characters
        self._check_size(max(self._tokenizer.get_vocab().values(), default=-1) + 1)
        with _panics_as_errors():
            self._tokenizer.encode(_RARE_CHARACTERS)  # raises an error if the model has no unk piece
        self._separator = " " if isinstance(self._tokenizer.model, models.WordPiece) else ""

    def _encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        with _panics_as_errors():
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def _locate(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        with _panics_as_errors():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2)

    def _encode_fragment(self, part: str) -> list[int]:
        return [token.id for token in self._tokenizer.model.tokenize(part)]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    @functools.cached_property
    def special_patterns(self) -> dict[str, int]:
        added = [token for token in json.loads(self.model)["added_tokens"] if token["special"]]
        return super().special_patterns | {
            r"\s*" * token["lstrip"] + re.escape(token["content"]) + r"\s*" * token["rstrip"]: token["id"]
            for token in added
        }

    def spellings(self) -> list[bytes]:
        pieces = [self._tokenizer.id_to_token(i) or "" for i in range(self.vocabulary.size)]
        if isinstance(self._tokenizer.model, models.WordPiece):
            prefix = self._tokenizer.model.continuing_subword_prefix
            return [(p.removeprefix(prefix) if p.startswith(prefix) else f" {p}").encode() for p in pieces]
        description = json.loads(self.model)
        if '"ByteLevel"' in json.dumps([description["pre_tokenizer"], description["decoder"]]):
            byte_of = {byte_character(byte): byte for byte in range(256)}
            # An added token can contain characters that represent no byte, for example spaces. It stands for itself.
            return [bytes(map(byte_of.get, p)) if byte_of.keys() >= set(p) else p.encode() for p in pieces]
        if suffix := getattr(self._tokenizer.model, "end_of_word_suffix", None):  # GPT-1; decoding gives a space
            pieces = [p.removesuffix(suffix) + " " * p.endswith(suffix) for p in pieces]
        return [piece_bytes(piece) for piece in pieces]


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Converts a panic of the `tokenizers` library inside the context to a UserError.

    A panic is a BaseException but not an Exception. One cause is a regular expression in a tokenizer.json that
    backtracks through 2^n paths for n characters, for example (a+)+$. A check in advance cannot detect this. The
    library stops matching after ten million steps (half a second) and panics.
    """
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise UserError(
            f"tokenizer.json cannot split this text ({e}). If a regular expression reached its limit, change the "
            "patterns of the normalizer and pre_tokenizer, or use another tokenizer"
        ) from None


def decisive_part(model: bytes, vocabulary: Vocabulary) -> str:
    """Returns the part of a tokenizer.json that determines a text's ids, as JSON.

    Truncation, padding and the post-processor are omitted. All special ids of the vocabulary are marked as special.
    """
    description = json.loads(model) | {"truncation": None, "padding": None, "post_processor": None}
    for token in description["added_tokens"]:
        token["special"] |= token["id"] in vocabulary.special_ids
        if token["special"]:  # special tokens never match text, so these flags have no effect
            token |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return json.dumps(description, ensure_ascii=False)


def byte_character(byte: int) -> str:
    """Returns the character that represents a byte in the pieces of byte-level BPE.

    A printable byte is represented by the character with the same code, and all other bytes, in order, by characters
    from U+0100 on. Source: the released code of Radford et al. 2019.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in printable else chr(0x100 + sorted(set(range(256)) - set(printable)).index(byte))


# --- configs --------------------------------------------------------------------------------------------------------


class _Subword(TokenizerConfig):
    """Base class of the configs that train a tokenizer with the `tokenizers` library."""

    kind = SubwordTokenizer
    specials: Mapping[str, str]
    hint: ClassVar[str] = ""  # end of the error message for missing special pieces

    @property
    def size(self) -> int:
        return self.vocab_size + self.num_sentinels

    def _train(self, tokenizer: tokenizers.Tokenizer, trainer: Any, texts: Iterator[str]) -> Tokenizer:
        tokenizer.train_from_iterator(texts, trainer)
        if tokenizer.get_vocab_size() < self.vocab_size:
            raise UserError(too_little_text(self.vocab_size, tokenizer.get_vocab_size()))
        if tokenizer.get_vocab_size() > self.vocab_size:
            raise UserError(
                f"config.tokenizer.vocab_size is {self.vocab_size}, but the alphabet and the special pieces alone need "
                f"{tokenizer.get_vocab_size()}"
            )
        model = json.loads(tokenizer.to_str())
        model["added_tokens"] = [t for t in model["added_tokens"] if t["content"] in self.specials.values()]
        return self._read(json.dumps(model, ensure_ascii=False).encode())

    def _read(self, model: bytes) -> Tokenizer:
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(model)
        except Exception as e:  # the library raises no specific type
            raise UserError(f"config.tokenizer.path={self.path} is not a tokenizer.json of tokenizers ({e})") from e
        ids = {field: tokenizer.token_to_id(piece) for field, piece in self.specials.items()}
        missing_pieces = sorted({piece for field, piece in self.specials.items() if ids[field] is None})
        if missing_pieces:
            raise UserError(
                f"config.tokenizer.path={self.path} has no {', '.join(missing_pieces)}: "
                f"it is not a {type(self).__name__}{self.hint}"
            )
        pieces = {i: self.specials[field] for field, i in ids.items()}
        if self.num_sentinels:
            sentinels = [f"<extra_id_{n}>" for n in range(self.num_sentinels)]
            tokenizer.add_special_tokens([tokenizers.AddedToken(s, normalized=False, special=True) for s in sentinels])
            model, ids["sentinels"] = tokenizer.to_str().encode(), tuple(map(tokenizer.token_to_id, sentinels))
            pieces |= dict(zip(ids["sentinels"], sentinels, strict=True))
        return SubwordTokenizer(model, Vocabulary(tokenizer.get_vocab_size(), **ids), pieces)


@dataclasses.dataclass
class WordPiece(_Subword):
    """Trains BERT's WordPiece tokenizer (Devlin et al. 2018, section 3).

    Decoding does not restore white space or, with `lowercase`, case and accents.
    """

    vocab_size: int = 30_522  # number of ids, special pieces included
    lowercase: bool = True  # lowercases text and strips accents ("uncased")
    path: Optional[str] = None  # a saved tokenizer or tokenizer.json to load instead of training
    train_bytes: int = 10_000_000  # bytes of text to train on

    specials = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}

    def build(self, texts: Iterator[str]) -> Tokenizer:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=self.lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(prefix="##")
        texts = list(texts)
        # The trainer assigns ids in an order that differs between runs. Single-character pieces that are declared as
        # special tokens get fixed ids, which also fixes the ids of all pieces that are merged from them.
        alphabet, suffix_pieces = self._alphabet(tokenizer, texts)
        trainer = trainers.WordPieceTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[*self.specials.values(), *suffix_pieces],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        return self._train(tokenizer, trainer, texts)

    def _alphabet(self, tokenizer: tokenizers.Tokenizer, texts: list[str]) -> tuple[list[str], list[str]]:
        """Returns the alphabet: the frequent characters c, and the pieces "##c" for characters inside words.

        The alphabet omits the rarest characters, which together are at most 0.01 % of the text. It also omits
        characters that do not fit into the vocabulary. Punctuation and Chinese characters have no piece "##c", because
        each of them is a separate word.
        """
        counts = collections.Counter()
        for text in texts:
            counts.update("".join(tokenizer.normalizer.normalize_str(text).split()))
        alphabet, suffix_pieces = [], []
        num_uncovered, free_ids = counts.total(), self.vocab_size - len(self.specials)
        for character in sorted(counts, key=lambda c: (-counts[c], c)):
            # For punctuation and Chinese characters, the pre-tokenizer returns two words, "a" and the character.
            words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(f"a{character}"))
            num_pieces = 2 if len(words) == 1 else 1
            if num_uncovered <= counts.total() * 1e-4 or num_pieces > free_ids:
                break
            num_uncovered, free_ids = num_uncovered - counts[character], free_ids - num_pieces
            alphabet.append(character)
            if num_pieces == 2:
                suffix_pieces.append(f"##{character}")
        return sorted(alphabet), sorted(suffix_pieces)


# config.tokenizer.special_pieces of a ByteBPE -> {Vocabulary field: special piece}, in the order of the ids.
_SPECIAL_PIECES = {
    "gpt2": {"bos": "<|endoftext|>", "eos": "<|endoftext|>"},
    "roberta": {
        **{"bos": "<s>", "cls": "<s>", "pad": "<pad>", "eos": "</s>", "sep": "</s>"},
        **{"unk": "<unk>", "mask": "<mask>"},
    },
    "bert": WordPiece.specials,
}


@dataclasses.dataclass
class ByteBPE(_Subword):
    """Trains GPT-2's byte-level byte pair encoding (Radford et al. 2019, section 2.2).

    Decoding restores the text exactly. The ids of sentinels, which GPT-2 does not have, follow the `vocab_size` pieces
    in ascending order: <extra_id_0> is the first id after the pieces.
    """

    vocab_size: int = 50_257  # number of ids, with special pieces and without sentinels
    path: Optional[str] = None  # a saved tokenizer or tokenizer.json to load instead of training
    num_sentinels: int = 0  # number of sentinels (<extra_id_0>, …) for span corruption; fill-in-the-middle needs three
    train_bytes: int = 10_000_000  # bytes of text to train on
    special_pieces: str = "gpt2"  # gpt2: <|endoftext|> | roberta: <s> <pad> </s> <unk> <mask> | bert: [PAD] [UNK] …

    hint = "; see config.tokenizer.special_pieces"

    @property
    def specials(self) -> dict[str, str]:
        return _SPECIAL_PIECES[self.special_pieces]

    def problems(self, experiment: Experiment) -> Iterator[str]:
        yield from super().problems(experiment)
        yield from special_piece_problems(self, _SPECIAL_PIECES)

    def build(self, texts: Iterator[str]) -> Tokenizer:
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=list(dict.fromkeys(self.specials.values())),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        return self._train(tokenizer, trainer, texts)
