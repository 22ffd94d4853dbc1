"""The tokenizers a config can choose. Each either learns its vocabulary from text (`build`) or reads one (`load`)."""

import collections
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any, ClassVar, Optional

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from pretrainax.config import UserError, kinds, nearest
from pretrainax.tokenization import sentencepiece as sentencepiece_models
from pretrainax.tokenization.base import (
    DESCRIPTION,
    CharacterTokenizer,
    SentencePieceTokenizer,
    SubwordTokenizer,
    Tokenizer,
    Vocabulary,
    load_tokenizer,
)
from pretrainax.tokenization.huggingface import read_tokenizer, tokenizer_file
from pretrainax.tokenization.sentencepiece import too_little_text


def check_tokenizer(tokenizer: Tokenizer, experiment: Any) -> None:
    """Raises a UserError where the vocabulary does not fit the model or the objective."""
    size, rows = tokenizer.vocabulary.size, experiment.model.vocab_size
    if size > rows:
        raise UserError(f"the tokenizer has {size} ids, config.model.vocab_size is {rows}: it must be at least {size}")
    experiment.objective.check_vocabulary(tokenizer.vocabulary, experiment.data.sequence_length)


class TokenizerConfig(kinds.TokenizerConfig):
    """Base of the tokenizer choices."""

    kind: ClassVar[type[Tokenizer]]
    path: Optional[str]
    train_bytes: Optional[int]  # how much text `build` needs; None: all there is

    @property
    def size(self) -> Optional[int]:
        """Ids of a vocabulary trained from this config, special ones included; None: only the text can tell."""
        return None

    def build(self, texts: Iterator[str]) -> Tokenizer:
        """Learns a vocabulary from text."""
        raise NotImplementedError

    def load(self) -> Tokenizer:
        """Reads `path`: a directory that `Tokenizer.save` wrote, a model file, or a directory that holds one."""
        path = os.path.expanduser(self.path)
        if os.path.exists(os.path.join(path, DESCRIPTION)):
            tokenizer = load_tokenizer(path)
            if type(tokenizer) is not self.kind:
                raise UserError(f"config.tokenizer.path={self.path} is no {type(self).__name__} tokenizer")
            return tokenizer
        file = os.path.join(path, self.kind.file) if os.path.isdir(path) else path
        try:
            with open(file, "rb") as f:
                return self._read(f.read())
        except OSError as e:
            raise UserError(f"config.tokenizer.path={self.path}: cannot read {file} ({e.strerror})") from e
        except UserError:
            raise
        except Exception as e:  # what the libraries raise, and what follows from a value of a wrong type
            raise UserError(f"config.tokenizer.path={self.path}: {file} is damaged ({type(e).__name__}: {e})") from e

    def problems(self, experiment: Any) -> Iterator[str]:
        if self.path is not None:
            if not os.path.exists(os.path.expanduser(self.path)):
                yield f"config.tokenizer.path is {self.path!r}, which does not exist"
            return
        if self.train_bytes is not None and self.train_bytes < 1:
            yield f"config.tokenizer.train_bytes is {self.train_bytes}, it must be at least 1"
        if self.size is not None and self.size > experiment.model.vocab_size:
            yield (
                f"config.model.vocab_size is {experiment.model.vocab_size}, the tokenizer will have {self.size} ids: "
                "make it at least that, or config.tokenizer.vocab_size smaller"
            )

    def _read(self, model: bytes) -> Tokenizer:
        raise NotImplementedError


class _SentencePiece(TokenizerConfig):
    kind = SentencePieceTokenizer
    model_type: ClassVar[str]

    @property
    def size(self) -> int:
        return self.vocab_size + self.num_sentinels

    @property
    def specials(self) -> dict[str, str]:
        return sentencepiece_models.SPECIALS[self.special_pieces]

    def problems(self, experiment: Any) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.num_sentinels < 0:
            yield f"config.tokenizer.num_sentinels is {self.num_sentinels}, it must be at least 0"
        yield from _unknown_pieces(self.special_pieces, sentencepiece_models.SPECIALS)

    def build(self, texts: Iterator[str]) -> Tokenizer:
        return self._read(sentencepiece_models.learn(texts, self.model_type, self.vocab_size, self.specials))

    def _read(self, model: bytes) -> Tokenizer:
        return sentencepiece_models.read(model, self.specials, self.num_sentinels, self.path)


@dataclasses.dataclass
class Unigram(_SentencePiece):
    """SentencePiece's unigram language model (Kudo 2018), lossless: bytes stand in for unknown characters.

    As in T5, pad = 0, eos = 1, unk = 2, and the sentinels come after the `vocab_size` pieces, <extra_id_0> last:
    32,000 pieces and 100 sentinels are 32,100 ids.
    """

    vocab_size: int = 32_000  # pieces to learn, without the sentinels
    path: Optional[str] = None  # read this instead: a saved tokenizer or a .model file (T5's, LLaMA's)
    num_sentinels: int = 100  # <extra_id_0> ... for span corruption
    train_bytes: int = 10_000_000  # of text to learn from
    special_pieces: str = "t5"  # t5: <pad> </s> <unk> | albert: <pad> <unk> [CLS] [SEP] [MASK] | llama | gemma

    model_type = "unigram"


@dataclasses.dataclass
class BPE(_SentencePiece):
    """SentencePiece's byte pair encoding (Kudo and Richardson 2018) of LLaMA 1 and 2, Mistral and Gemma, lossless.

    It merges characters, not bytes, within words and the spaces before them; bytes stand in for unknown characters.
    As in LLaMA, unk = 0, bos = 1, eos = 2.
    """

    vocab_size: int = 32_000  # pieces to learn, without the sentinels
    path: Optional[str] = None  # read this instead: a saved tokenizer or a .model file (LLaMA's, Gemma's)
    num_sentinels: int = 0  # <extra_id_0> ... for span corruption
    train_bytes: int = 10_000_000  # of text to learn from
    special_pieces: str = "llama"  # llama: <unk> <s> </s> | gemma: <pad> <eos> <bos> <unk> | t5 | albert

    model_type = "bpe"


def _unknown_pieces(name: str, allowed: dict[str, dict]) -> Iterator[str]:
    if name not in allowed:
        yield f"config.tokenizer.special_pieces is {name!r}, {nearest(name, allowed)}"


class _Subword(TokenizerConfig):
    kind = SubwordTokenizer
    specials: dict[str, str]  # Vocabulary field -> piece
    hint: ClassVar[str] = ""  # end of the error line where a file lacks some
    num_sentinels: int = 0

    @property
    def size(self) -> int:
        return self.vocab_size + self.num_sentinels

    def _train(self, tokenizer: tokenizers.Tokenizer, trainer: Any, texts: Iterator[str]) -> Tokenizer:
        tokenizer.train_from_iterator(texts, trainer)
        if tokenizer.get_vocab_size() < self.vocab_size:
            raise UserError(too_little_text(self.vocab_size, tokenizer.get_vocab_size()))
        if tokenizer.get_vocab_size() > self.vocab_size:
            raise UserError(
                f"config.tokenizer.vocab_size is {self.vocab_size}, the alphabet and the special pieces alone need "
                f"{tokenizer.get_vocab_size()}"
            )
        model = json.loads(tokenizer.to_str())
        model["added_tokens"] = [t for t in model["added_tokens"] if t["content"] in self.specials.values()]
        return self._read(json.dumps(model, ensure_ascii=False).encode())

    def _read(self, model: bytes) -> Tokenizer:
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(model)
        except Exception as e:  # the library raises nothing more precise
            raise UserError(f"config.tokenizer.path={self.path} is no tokenizer.json of tokenizers ({e})") from e
        ids = {field: tokenizer.token_to_id(piece) for field, piece in self.specials.items()}
        missing = sorted({piece for field, piece in self.specials.items() if ids[field] is None})
        if missing:
            raise UserError(
                f"config.tokenizer.path={self.path} has no {', '.join(missing)}: no {type(self).__name__}{self.hint}"
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
    """BERT's word pieces (Devlin et al. 2018, section 3). Lossy: white space, and with `lowercase` case and accents."""

    vocab_size: int = 30_522  # special pieces included
    lowercase: bool = True  # and strip accents ("uncased")
    path: Optional[str] = None  # read this instead: a saved tokenizer or a tokenizer.json
    train_bytes: int = 10_000_000  # of text to learn from

    specials = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}

    def build(self, texts: Iterator[str]) -> Tokenizer:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=self.lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(prefix="##")
        texts = list(texts)
        # The trainer numbers pieces as it meets them, in an order that changes from run to run. Named beforehand as
        # special ones, the pieces of one character have fixed ids, and with them all that is built of them.
        alphabet, within = self._alphabet(tokenizer, texts)
        trainer = trainers.WordPieceTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[*self.specials.values(), *within],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        return self._train(tokenizer, trainer, texts)

    def _alphabet(self, tokenizer: tokenizers.Tokenizer, texts: list[str]) -> tuple[list[str], list[str]]:
        """The frequent characters, which make up 99.99 % of the text, and those that stand within words, as ##c."""
        counts = collections.Counter()
        for text in texts:
            counts.update("".join(tokenizer.normalizer.normalize_str(text).split()))
        alphabet, within = [], []
        missing, room = counts.total(), self.vocab_size - len(self.specials)
        for character in sorted(counts, key=lambda c: (-counts[c], c)):
            # Punctuation and Chinese characters are words of their own.
            word = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(f"a{character}"))
            pieces = 2 if len(word) == 1 else 1
            if missing <= counts.total() * 1e-4 or pieces > room:
                break
            missing, room = missing - counts[character], room - pieces
            alphabet.append(character)
            if pieces == 2:
                within.append(f"##{character}")
        return sorted(alphabet), sorted(within)


# config.tokenizer.special_pieces of a ByteBPE -> its special pieces, in the order of their ids
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
    """GPT-2's byte-level byte pair encoding (Radford et al. 2019, section 2.2), lossless.

    The sentinels, which GPT-2 has not, come after the `vocab_size` pieces, <extra_id_0> first.
    """

    vocab_size: int = 50_257  # special pieces included, sentinels not
    path: Optional[str] = None  # read this instead: a saved tokenizer or a tokenizer.json
    num_sentinels: int = 0  # <extra_id_0> ... for span corruption; three of them to fill in the middle
    train_bytes: int = 10_000_000  # of text to learn from
    special_pieces: str = "gpt2"  # gpt2: <|endoftext|> | roberta: <s> <pad> </s> <unk> <mask> | bert: [PAD] [UNK] …

    hint = "; see config.tokenizer.special_pieces"

    @property
    def specials(self) -> dict[str, str]:
        return _SPECIAL_PIECES[self.special_pieces]

    def problems(self, experiment: Any) -> Iterator[str]:
        yield from super().problems(experiment)
        if self.num_sentinels < 0:
            yield f"config.tokenizer.num_sentinels is {self.num_sentinels}, it must be at least 0"
        yield from _unknown_pieces(self.special_pieces, _SPECIAL_PIECES)

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


@dataclasses.dataclass
class Characters(TokenizerConfig):
    """Every character of the text, in sorted order, after pad, eos and unk."""

    path: Optional[str] = None  # read this instead: a saved tokenizer

    kind = CharacterTokenizer
    train_bytes = None

    def build(self, texts: Iterator[str]) -> Tokenizer:
        characters = set()
        for text in texts:
            characters.update(text)
        if not characters:
            raise UserError("there is no text to take the characters from; see config.data.source")
        return self._read(json.dumps(sorted(characters)).encode())

    def _read(self, model: bytes) -> Tokenizer:
        pieces = {0: "<pad>", 1: "</s>", 2: "<unk>"}
        vocabulary = Vocabulary(len(pieces) + len(json.loads(model)), pad=0, eos=1, unk=2)
        return CharacterTokenizer(model, vocabulary, pieces)


@dataclasses.dataclass
class PretrainedTokenizer(TokenizerConfig):
    """The tokenizer of a Hugging Face directory: that of RoBERTa, T5, LLaMA 3, …, with the ids of their weights."""

    path: Optional[str] = None  # the directory: a tokenizer.json, or the files of older models

    train_bytes = None

    def problems(self, experiment: Any) -> Iterator[str]:
        if self.path is None:
            yield "config.tokenizer.path is None, it must be a Hugging Face directory"
            return
        try:
            tokenizer_file(os.path.expanduser(self.path))
        except UserError as e:
            yield f"config.tokenizer.path: {e}"

    def load(self) -> Tokenizer:
        try:
            return read_tokenizer(os.path.expanduser(self.path))
        except UserError as e:
            raise UserError(f"config.tokenizer.path: {e}") from e
