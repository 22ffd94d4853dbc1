"""SentencePiece models: learning one, lossless, with the special pieces of a published family."""

import io
import re
from collections.abc import Iterator, Mapping

import sentencepiece

from pretrainax.config import UserError
from pretrainax.tokenization.base import SPACE_MARK, SentencePieceTokenizer, Vocabulary

# config.tokenizer.special_pieces -> Vocabulary field: piece, in the order of their ids
SPECIALS = {
    "t5": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    "albert": {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "llama": {"unk": "<unk>", "bos": "<s>", "eos": "</s>"},
    "gemma": {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"},
}
_DEFAULTS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}  # those that SentencePiece has settings for
_RARE = 1e-3  # share of the characters; SentencePiece leaves out the rarest ones that make up 5e-4 of a text


def learn(texts: Iterator[str], model_type: str, vocab_size: int, specials: Mapping[str, str]) -> bytes:
    """A model of `vocab_size` pieces, special ones and 256 of bytes included. model_type: unigram | bpe."""
    model = io.BytesIO()
    settings = {f"{field}_id": -1 for field in _DEFAULTS}
    for i, (field, piece) in enumerate(specials.items()):
        if field in _DEFAULTS:
            settings[f"{field}_id"] = i
            if piece != _DEFAULTS[field]:  # what is set is written to the model, and changes its fingerprint
                settings[f"{field}_piece"] = piece
    lines = [line for text in texts for line in text.split("\n") if line]
    if sum(line.count(" ") for line in lines) < _RARE * sum(map(len, lines)):  # as in Chinese
        settings["required_chars"] = SPACE_MARK  # or a space would be three bytes that are read as the mark
    if others := [piece for field, piece in specials.items() if field not in _DEFAULTS]:
        settings["control_symbols"] = others  # they get the ids that are left
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            **settings,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation
            byte_fallback=True,
            user_defined_symbols=["\n", "\n\n"],
            max_sentence_length=1 << 20,  # bytes of a line; longer ones are left out
            num_threads=4,  # the result depends on it: the same on every machine
            minloglevel=2,
        )
    except RuntimeError as e:
        raise UserError(_explain(str(e), vocab_size)) from e
    return model.getvalue()


def read(model: bytes, specials: Mapping[str, str], num_sentinels: int, path: str | None) -> SentencePieceTokenizer:
    """A model as a tokenizer: [CLS] and the like as `specials` names them, the others as the model does itself.

    The sentinels come after its pieces, <extra_id_0> last.
    """
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(model)
    except RuntimeError as e:
        raise UserError(f"config.tokenizer.path={path} is no SentencePiece model") from e
    ids = {field: i for field in _DEFAULTS if (i := getattr(processor, f"{field}_id")()) >= 0}
    ids |= {field: processor.piece_to_id(piece) for field, piece in specials.items() if field not in _DEFAULTS}
    missing = [specials[field] for field in ids.keys() - _DEFAULTS.keys() if not processor.is_control(ids[field])]
    if missing:
        raise UserError(
            f"config.tokenizer.path={path} has no {', '.join(sorted(missing))}; see config.tokenizer.special_pieces"
        )
    size = processor.get_piece_size() + num_sentinels
    sentinels = tuple(size - 1 - n for n in range(num_sentinels))
    pieces = {i: processor.id_to_piece(i) for i in ids.values()}
    pieces |= {i: f"<extra_id_{n}>" for n, i in enumerate(sentinels)}
    return SentencePieceTokenizer(model, Vocabulary(size, **ids, sentinels=sentinels), pieces)


def _explain(error: str, vocab_size: int) -> str:
    too_high = re.search(r"to a value <= (\d+)", error)
    too_low = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if too_high:
        return too_little_text(vocab_size, int(too_high[1]))
    if too_low:
        return f"config.tokenizer.vocab_size is {vocab_size}, the characters alone of this text need {too_low[1]}"
    return (
        f"SentencePiece cannot learn from this text, config.tokenizer.vocab_size={vocab_size}: {error.split('] ')[-1]}"
    )


def too_little_text(vocab_size: int, most: int) -> str:
    return (
        f"config.tokenizer.vocab_size is {vocab_size}, this text is enough for {most} at most: "
        "set it lower, or give more text"
    )
