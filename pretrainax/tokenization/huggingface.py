"""Loads tokenizers from Hugging Face directories, with the same token ids as in transformers.

`huggingface_export` writes such directories. A tokenizer that is written and loaded again has the same ids, vocabulary
and fingerprint. This module reads JSON files, text files and SentencePiece models. It never runs code from a
repository.

For text without special pieces, the ids are the same as in transformers. This module encodes a special piece within a
text ("<s>", "[MASK]") as ordinary characters, whereas transformers encodes it as the special id unless
`split_special_tokens=True`.

The special tokens around a text (`Vocabulary.frame`) are the same as with AutoTokenizer of transformers 5. The
post-processor of tokenizer.json defines them, unless the tokenizer class replaces the post-processor.
"""

import dataclasses
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Optional, TypeVar

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pretrainax.config import Experiment, RunFailed, UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.files.regular_files import read_bytes
from pretrainax.storage.places import local_path
from pretrainax.tokenization.base import DESCRIPTION, Tokenizer, Vocabulary, check_no_run, load_tokenizer
from pretrainax.tokenization.choices import TokenizerConfig
from pretrainax.tokenization.directory_settings import decoder_start, left_sides, read_json, tokenizer_class
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame, probe_frame
from pretrainax.tokenization.sentencepiece import SentencePieceTokenizer
from pretrainax.tokenization.subwords import SubwordTokenizer, byte_character, decisive_part
from pretrainax.tokenization.tokenizer_json import add_special, tokenizer_json

TokenizerKind = TypeVar("TokenizerKind", bound=Tokenizer)
_MAX_SENTINELS = 1_000_000  # the strings of a million sentinels take about 100 MB
FIELDS = ("pad", "bos", "eos", "unk", "cls", "sep", "mask")
# Special pieces of directories that list none: the first entry whose pieces are all in the vocabulary.
_CONVENTIONS = (
    dict(pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]"),  # BERT, ELECTRA, DeBERTa
    dict(pad="<pad>", unk="<unk>", cls="[CLS]", sep="[SEP]", mask="[MASK]"),  # ALBERT
    dict(pad="<pad>", unk="<unk>", bos="<s>", eos="</s>", cls="<s>", sep="</s>", mask="<mask>"),  # RoBERTa, BART
    dict(pad="<pad>", unk="<unk>", bos="<bos>", eos="<eos>"),  # Gemma
    dict(unk="<unk>", bos="<s>", eos="</s>"),  # LLaMA
    dict(pad="<pad>", unk="<unk>", eos="</s>"),  # T5
    dict(bos="<|begin_of_text|>", eos="<|end_of_text|>"),  # LLaMA 3
    dict(bos="<|endoftext|>", eos="<|endoftext|>"),  # GPT-2
    dict(unk="<unk>"),  # GPT-1
)
_SENTINEL = re.compile("\u2581?<extra_id_([0-9]+)>")  # in mT5, the space mark precedes the piece
# Tokenizer file of older models -> the classes of transformers (without "Tokenizer" and "Fast") that the file fully
# defines. Other classes split or lowercase text in their own code, so they require a tokenizer.json.
_CLASSES_OF_FILE = {
    "spiece.model": ("T5", "MT5"),
    "spm.model": ("DebertaV2",),
    "tokenizer.model": ("Llama", "CodeLlama", "Gemma"),
    "vocab.txt": ("Bert", "DistilBert", "Electra"),
    "merges.txt": ("GPT2", "Roberta", "Bart"),
}
# Fields of tokenizer_config.json that override a component of tokenizer.json in transformers: field, component, type
# and field of the component, file of the classes with a default for the field, default.
_OVERRIDES = (
    ("do_lower_case", "normalizer", "BertNormalizer", "lowercase", "vocab.txt", True),
    ("strip_accents", "normalizer", "BertNormalizer", "strip_accents", "vocab.txt", None),
    ("tokenize_chinese_chars", "normalizer", "BertNormalizer", "handle_chinese_chars", "vocab.txt", True),
    ("add_prefix_space", "pre_tokenizer", "ByteLevel", "add_prefix_space", "merges.txt", False),
)
_ADDING_SPACE = ("Llama", "CodeLlama")  # classes in which add_prefix_space, by default true, overrides tokenizer.model
# model_type -> the tokenizer class that transformers uses if no file names a class; only classes in `_CLASS_FRAMES`.
_CLASS_OF_MODEL = {
    **dict.fromkeys(("bert", "distilbert", "electra", "big_bird"), "Bert"),
    **dict.fromkeys(("roberta", "bart", "longformer", "deberta"), "Roberta"),
    **dict.fromkeys(("t5", "mt5", "switch_transformers"), "T5"),
    **{"albert": "Albert", "deberta-v2": "DebertaV2", "xlm-roberta": "XLMRoberta", "camembert": "XLMRoberta"},
}
# The model_types for which transformers ignores the tokenizer class in the files and uses tokenizer.json.
_WITHOUT_CLASS = ("mistral", "mixtral", "modernbert", "olmo2", "olmo3", "phi3", "umt5")
# The special tokens before, between and after the two texts, as fields of `Vocabulary`; the second text's token type.
_BERT, _ROBERTA = (("cls",), ("sep",), ("sep",), 1), (("cls",), ("sep", "sep"), ("sep",), 0)
_XLM_ROBERTA, _T5 = (("bos",), ("eos", "eos"), ("eos",), 0), ((), ("eos",), ("eos",), 0)
# Tokenizer classes that replace the post-processor of tokenizer.json; they also apply to the files of older models.
_CLASS_FRAMES = {
    **dict.fromkeys(("Bert", "DistilBert", "Electra", "BigBird", "DebertaV2", "Albert"), _BERT),
    **dict.fromkeys(("Roberta", "Bart", "Longformer", "Deberta"), _ROBERTA),
    **dict.fromkeys(("XLMRoberta", "Camembert"), _XLM_ROBERTA),
    **dict.fromkeys(("T5", "MT5", "ByT5"), _T5),
}


def tokenizer_file(directory: str) -> str:
    """Returns the name of the file that defines a Hugging Face directory's tokenizer.

    Raises:
      UserError: the directory does not exist, or has no supported tokenizer file.
    """
    if not os.path.isdir(directory):
        raise UserError(f"{directory} is not a directory")
    for name in (DESCRIPTION, "tokenizer.json", *_CLASSES_OF_FILE):
        required_files = ("vocab.json", name) if name == "merges.txt" else (name,)
        if all(os.path.isfile(os.path.join(directory, file)) for file in required_files):
            return name
    if tokenizer_class(directory) == "ByT5":
        return "tokenizer_config.json"
    check_no_run(directory)
    shifted_file = "sentencepiece.bpe.model"  # XLM-R, mBART, CamemBERT
    has_shifted = os.path.exists(os.path.join(directory, shifted_file))
    reason = f"; the ids in {shifted_file} differ from the ids of the model" * has_shifted
    raise UserError(
        f"{directory} holds no supported tokenizer file, neither tokenizer.json nor {', '.join(_CLASSES_OF_FILE)}"
        f"{reason}. In transformers, AutoTokenizer.from_pretrained(…).save_pretrained(…) writes a tokenizer.json"
    )


def read_tokenizer(directory: str) -> Tokenizer:
    """Loads the tokenizer in a Hugging Face directory.

    Directories written by `write_tokenizer` or `Tokenizer.save` are also supported. SentencePiece models run in the
    `sentencepiece` library, all other tokenizers in the `tokenizers` library.

    Raises:
      UserError: the directory has no tokenizer, or its files are damaged or do not fully determine the ids.
    """
    name = tokenizer_file(directory)
    try:
        if name == DESCRIPTION:
            tokenizer = load_tokenizer(directory)
            if _is_consistent(tokenizer, directory):
                exported = (os.path.join(directory, file) for file in ("tokenizer.json", "tokenizer_config.json"))
                if not all(map(os.path.exists, exported)):
                    return tokenizer
                return _Directory(directory).with_model_tokens(tokenizer, "tokenizer.json")
            name = "tokenizer.json"
        return _Directory(directory).read(name)
    except OSError as e:
        raise UserError(f"cannot read {e.filename} ({e.strerror})") from e
    except UserError:
        raise
    except Exception as e:  # errors of the libraries, and errors from values of wrong types
        raise UserError(f"the tokenizer in {directory} is damaged ({type(e).__name__}: {e})") from e


def _is_consistent(tokenizer: Tokenizer, directory: str) -> bool:
    """Returns True if a tokenizer saved by `Tokenizer.save` is consistent with the other files in its directory.

    The other files may be newer, for example if transformers has written a tokenizer.json to the same directory.
    """
    try:
        stored = read_bytes(os.path.join(directory, "tokenizer.json"))
    except FileNotFoundError:
        return True
    if isinstance(tokenizer, SubwordTokenizer):
        return not os.path.exists(os.path.join(directory, "tokenizer_config.json"))
    ours, theirs = (json.loads(decisive_part(m, tokenizer.vocabulary)) for m in (tokenizer_json(tokenizer), stored))
    return ours == theirs


class _Directory:
    """Builds a tokenizer from the files in a Hugging Face directory."""

    def __init__(self, directory: str):
        self._directory = directory
        self._config = self._read_json("tokenizer_config.json")
        # tokenizer_config.json overrides the older special_tokens_map.json.
        settings = self._read_json("special_tokens_map.json") | self._config
        self._piece_of_field = {field: _token_string(settings.get(f"{field}_token")) for field in FIELDS}
        self._piece_of_field = {field: piece for field, piece in self._piece_of_field.items() if piece}
        extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
        self._extra_pieces = [_token_string(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
        self._added_ids = dict(self._read_json("added_tokens.json"))
        decoder = self._config.get("added_tokens_decoder") or {}
        self._added_ids |= {_token_string(token): int(i) for i, token in decoder.items()}

    def read(self, name: str) -> Tokenizer:
        class_name = tokenizer_class(self._directory)
        if class_name and class_name not in _CLASSES_OF_FILE.get(name, (class_name,)):
            raise self._error(
                f"{name} does not define how {class_name}Tokenizer splits text: tokenizer.json is required"
            )
        if name.endswith(".model"):
            tokenizer = self._load_sentencepiece(name)
            theirs, ours = self._config.get("add_prefix_space") is not False, tokenizer.text_table.adds_space
            if class_name in _ADDING_SPACE and theirs != ours:
                raise self._override_error("add_prefix_space", theirs, ours, name)
            return self.with_model_tokens(tokenizer, name)
        loaders = {
            "tokenizer.json": self._load_tokenizer_json,
            "vocab.txt": self._load_wordpiece,
            "merges.txt": self._load_byte_bpe,
        }
        return self.with_model_tokens(loaders.get(name, self._build_byt5)(), name)

    def with_model_tokens(self, tokenizer: TokenizerKind, name: str) -> TokenizerKind:
        """Sets the vocabulary's `frame`, `decoder_start` and `left_sides`, and the added spaces, from the files.

        Args:
          name: the file that defines the tokenizer.
        """
        frame = self._class_frame(tokenizer.vocabulary, name)
        if frame is None and name == "tokenizer.json":
            frame = probe_frame(tokenizers.Tokenizer.from_buffer(self._read_file(name)))
            if frame is None:
                raise self._error(
                    "the post_processor of tokenizer.json must add the same special tokens before and after every text"
                )
        elif frame is None:
            frame = self._flag_frame(tokenizer.vocabulary)
        if outside := [i for i in frame.ids if i >= tokenizer.vocabulary.size]:
            raise self._error(f"the post_processor of tokenizer.json adds id {outside[0]}, which the vocabulary lacks")
        class_name = self._class_name() or {"tokenizer.model": "Llama"}.get(name)
        start, left = decoder_start(self._directory), left_sides(self._directory, class_name)
        tokenizer.vocabulary = dataclasses.replace(
            tokenizer.vocabulary, frame=frame, decoder_start=start, left_sides=left
        )
        if class_name in _ADDING_SPACE and tokenizer.text_table.adds_space:
            tokenizer.prefix_spaces = "always" if self._config.get("legacy") else "first"
        return tokenizer

    def _load_tokenizer_json(self) -> SubwordTokenizer:
        """Loads a tokenizer from tokenizer.json; raises UserError if the other files contradict it."""
        model = self._read_file("tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(model)
        except Exception as e:  # the library raises no specific type
            raise self._error(f"tokenizers {tokenizers.__version__} cannot load tokenizer.json ({e})") from e
        description = json.loads(model)
        self._check_overrides(description)
        if description["model"].get("dropout"):
            raise self._error("tokenizer.json samples pieces at random (BPE dropout): set its model.dropout to null")
        if missing_pieces := [piece for piece, i in self._added_ids.items() if tokenizer.token_to_id(piece) != i]:
            raise self._error(
                f"tokenizer_config.json or added_tokens.json adds pieces that tokenizer.json lacks: {missing_pieces}"
            )
        return self._build_subword(tokenizer, model)

    def _check_overrides(self, description: JsonObject) -> None:
        """Raises UserError if transformers overrides a component of tokenizer.json with another value.

        Args:
          description: the parsed tokenizer.json.
        """
        class_name = self._class_name()
        for key, name, component_type, field, file, default in _OVERRIDES:
            component = description[name] or {}
            if component.get("type") != component_type:
                continue
            ours = component[field]
            theirs = self._config.get(key, default if class_name in _CLASSES_OF_FILE[file] else ours)
            without_accents = component.get("lowercase")  # what null means for strip_accents
            if (without_accents if theirs is None else theirs) != (without_accents if ours is None else ours):
                raise self._override_error(key, theirs, ours, "tokenizer.json")

    def _override_error(self, key: str, theirs: object, ours: object, file: str) -> UserError:
        """Returns the error for a setting that is `theirs` in transformers, but `ours` in the file `file`."""
        absent = "" if key in self._config else f", the default of {self._class_name()}Tokenizer"
        problem = f"tokenizer_config.json has {key} {theirs}{absent}, but {file} {ours}"
        return self._error(f"{problem}: set {key} to the value of the model's training")

    def _load_wordpiece(self) -> SubwordTokenizer:
        """Loads a WordPiece tokenizer (BERT) from vocab.txt, which has one piece per line."""
        vocabulary = {piece: i for i, piece in enumerate(self._read_lines("vocab.txt"))}
        unk = self._piece_of_field.get("unk", "[UNK]")
        tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unk))
        tokenizer.normalizer = normalizers.BertNormalizer(
            lowercase=self._config.get("do_lower_case", True),
            strip_accents=self._config.get("strip_accents"),
            handle_chinese_chars=self._config.get("tokenize_chinese_chars", True),
        )
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(prefix="##")
        return self._build_subword(self._add_pieces(tokenizer))

    def _load_byte_bpe(self) -> SubwordTokenizer:
        """Loads a byte-level BPE tokenizer from vocab.json and merges.txt (GPT-2, RoBERTa, BART)."""
        vocabulary = self._read_json("vocab.json")
        if not set(pre_tokenizers.ByteLevel.alphabet()) <= vocabulary.keys():
            raise self._error("vocab.json is not byte-level, as in GPT-2: tokenizer.json is required")
        lines = self._read_lines("merges.txt")
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        try:
            model = models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="")
        except Exception as e:
            raise self._error(f"vocab.json and merges.txt do not fit ({e})") from e
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=self._config.get("add_prefix_space", False))
        tokenizer.decoder = decoders.ByteLevel()
        return self._build_subword(self._add_pieces(tokenizer))

    def _build_byt5(self) -> SubwordTokenizer:
        """Builds the tokenizer of ByT5, which needs no model file: the id of byte b is b + 3."""
        special_pieces = {0: "<pad>", 1: "</s>", 2: "<unk>"} | {
            259 + n: f"<extra_id_{n}>" for n in range(self._num_sentinels(125))
        }
        vocabulary = {byte_character(byte): byte + 3 for byte in range(256)} | {
            piece: i for i, piece in special_pieces.items()
        }
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return self._build_subword(self._add_pieces(tokenizer))

    def _load_sentencepiece(self, name: str) -> SentencePieceTokenizer:
        """Loads a tokenizer (T5, LLaMA, Gemma, DeBERTa) from the SentencePiece model file `name`."""
        model = self._read_file(name)
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.load_from_serialized_proto(model)
        except RuntimeError as e:
            raise self._error(f"{name} is not a SentencePiece model (tiktoken files require tokenizer.json)") from e
        pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
        appended = [piece for piece, i in sorted(self._added_ids.items(), key=lambda item: item[1]) if i >= len(pieces)]
        if name == "spm.model":
            appended = appended or ["[MASK]"]  # added by DebertaV2Tokenizer
        elif {"[CLS]", "<cls>"} & set(pieces):
            raise self._error(f"transformers preprocesses text for {name} (ALBERT, XLNet): tokenizer.json is required")
        if name == "spiece.model" and not any(map(_SENTINEL.fullmatch, [*pieces, *appended])):
            appended = [*(f"<extra_id_{n}>" for n in reversed(range(self._num_sentinels(100)))), *appended]
        ids = {piece: i for i, piece in enumerate([*pieces, *appended])}
        self._check_added_ids(ids)
        vocabulary, special_pieces = self._build_vocabulary(ids)
        special_pieces |= {ids[piece]: piece for piece in appended}
        return SentencePieceTokenizer(model, vocabulary, special_pieces)

    # --- special tokens around a text

    def _class_frame(self, vocabulary: Vocabulary, name: str) -> Optional[SpecialTokenFrame]:
        """Returns the frame that the tokenizer class defines, or None if the class defines none."""
        class_name = self._class_name()
        if class_name is None:
            return None
        if not class_name and name != "tokenizer.json":
            is_roberta = name == "merges.txt" and vocabulary.cls is not None
            class_name = "Roberta" if is_roberta else _CLASSES_OF_FILE.get(name, ("ByT5",))[0]
        if class_name == "Albert" and json.loads(self._read_file("tokenizer.json"))["post_processor"]:
            return None  # this class has a frame only for files without a frame
        if class_name not in _CLASS_FRAMES:
            return None
        *fields, second_type = _CLASS_FRAMES[class_name]
        before, between, after = (tuple(getattr(vocabulary, field) for field in names) for names in fields)
        if None in (*before, *between, *after):
            return None
        types = (0,) * (len(before) + 1 + len(between)) + (second_type,) * (1 + len(after))
        return SpecialTokenFrame(RowFrame(before, (), after), RowFrame.typed(before, between, after, types))

    def _class_name(self) -> Optional[str]:
        """Returns the tokenizer class that a file names, or the class of the model_type if no file names a class.

        Returns None if transformers ignores the class.
        """
        model_type = self._read_json("config.json").get("model_type")
        if model_type in _WITHOUT_CLASS:
            return None
        return tokenizer_class(self._directory) or _CLASS_OF_MODEL.get(str(model_type), "")

    def _flag_frame(self, vocabulary: Vocabulary) -> SpecialTokenFrame:
        """Returns the frame that the fields add_bos_token and add_eos_token of tokenizer_config.json define."""
        flags = {"add_bos_token": tokenizer_class(self._directory) == "CodeLlama", "add_eos_token": False}
        flags = {name: self._config.get(name, default) for name, default in flags.items()}
        bos = () if vocabulary.bos is None or not flags["add_bos_token"] else (vocabulary.bos,)
        eos = () if vocabulary.eos is None or not flags["add_eos_token"] else (vocabulary.eos,)
        types = (0,) * len((*bos, "A", *eos)) + (1,) * len((*bos, "B", *eos))
        return SpecialTokenFrame(RowFrame(bos, (), eos), RowFrame.typed(bos, eos + bos, eos, types))

    # --- shared helpers

    def _build_subword(self, tokenizer: tokenizers.Tokenizer, model: Optional[bytes] = None) -> SubwordTokenizer:
        vocabulary, special_pieces = self._build_vocabulary(tokenizer.get_vocab())
        special_pieces = dict(sorted(special_pieces.items()))
        if model is None:
            add_special(tokenizer, special_pieces)
            model = tokenizer.to_str().encode()
        return SubwordTokenizer(model, vocabulary, special_pieces)

    def _build_vocabulary(self, id_of_piece: Mapping[str, int]) -> tuple[Vocabulary, dict[int, str]]:
        """Builds the `Vocabulary` from a mapping of pieces to ids; returns the vocabulary and {special id: piece}."""
        ids = set(id_of_piece.values())
        if num_missing := max(ids) + 1 - len(ids):
            first = next(i for i in itertools.count() if i not in ids)
            raise self._error(f"the vocabulary has no piece for {num_missing} of its ids, the first is {first}")
        piece_of_field = self._piece_of_field
        if not piece_of_field:
            matching_conventions = (pieces for pieces in _CONVENTIONS if set(pieces.values()) <= id_of_piece.keys())
            piece_of_field = next(matching_conventions, {})
        if missing_pieces := {
            f"{field}_token {piece!r}" for field, piece in piece_of_field.items() if piece not in id_of_piece
        }:
            raise self._error(f"{', '.join(sorted(missing_pieces))} is not in the vocabulary")
        special = {field: id_of_piece[piece] for field, piece in piece_of_field.items()}
        if special.get("unk") in (special.get("bos"), special.get("eos")):
            special.pop("unk", None)  # GPT-2's <|endoftext|>: byte-level BPE has no unknown text
        sentinel_ids = {int(m[1]): i for piece, i in id_of_piece.items() if (m := _SENTINEL.fullmatch(piece))}
        sentinels = tuple(sentinel_ids[n] for n in sorted(sentinel_ids))
        piece_of = {i: piece for piece, i in id_of_piece.items()}
        pieces = {i: piece_of[i] for i in (*special.values(), *sentinels)}
        return dataclasses.replace(Vocabulary(len(ids), sentinels=sentinels), **special), pieces

    def _add_pieces(self, tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """Adds the pieces in added_tokens.json and added_tokens_decoder to a tokenizer; returns the same tokenizer."""
        for piece, _ in sorted(self._added_ids.items(), key=lambda item: item[1]):
            tokenizer.add_tokens([tokenizers.AddedToken(piece, normalized=False)])
        self._check_added_ids(tokenizer.get_vocab())
        return tokenizer

    def _check_added_ids(self, id_of_piece: Mapping[str, int]) -> None:
        if wrong_ids := [f"{piece!r} as {i}" for piece, i in self._added_ids.items() if id_of_piece.get(piece) != i]:
            raise self._error(f"the added tokens do not fit the vocabulary: {', '.join(wrong_ids)}")

    def _num_sentinels(self, default: int) -> int:
        num_listed = len([piece for piece in self._extra_pieces if _SENTINEL.fullmatch(piece)])
        number = self._config.get("extra_ids", num_listed or default)
        if type(number) is not int or not 0 <= number <= _MAX_SENTINELS:
            raise self._error(f"extra_ids is {number!r}, it must be an integer from 0 to {_MAX_SENTINELS:,}")
        return number

    def _read_file(self, name: str) -> bytes:
        return read_bytes(os.path.join(self._directory, name))

    def _read_lines(self, name: str) -> list[str]:
        return [line.removesuffix("\n") for line in io.StringIO(self._read_file(name).decode("utf-8"), newline=None)]

    def _read_json(self, name: str) -> JsonObject:
        return read_json(self._directory, name)

    def _error(self, problem: str) -> UserError:
        return UserError(f"the tokenizer in {self._directory}: {problem}")


def _token_string(token: Any) -> Any:
    """Returns the string of a token that a transformers JSON file gives as "</s>" or {"content": "</s>", …}."""
    return token.get("content") if isinstance(token, dict) else token


@dataclasses.dataclass
class PretrainedTokenizer(TokenizerConfig):
    """Loads the tokenizer of a Hugging Face directory (RoBERTa, T5, LLaMA 3, …), to match pretrained weights."""

    # a directory or hf:org/name[@revision] with a tokenizer.json or the tokenizer files of older models
    path: Optional[str] = None

    train_bytes = None

    def problems(self, experiment: Experiment) -> Iterator[str]:
        if self.path is None:
            yield "config.tokenizer.path is None, it must be a Hugging Face directory, or hf:org/name"
            return
        try:
            tokenizer_file(local_path(os.path.expanduser(self.path)))
        except RunFailed:  # the error is not in this field
            raise
        except UserError as e:
            yield f"config.tokenizer.path: {e}"

    def load(self) -> Tokenizer:
        try:
            tokenizer = read_tokenizer(local_path(os.path.expanduser(self.path)))
        except UserError as e:
            raise type(e)(f"config.tokenizer.path: {e}") from e
        tokenizer.prefix_spaces = None  # as in the files of the run and of its exports
        return tokenizer
