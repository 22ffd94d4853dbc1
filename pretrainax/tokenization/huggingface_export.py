"""Writes tokenizers as Hugging Face directories, from which transformers loads a tokenizer with the same token ids."""

import json
import os
from typing import Optional

import tokenizers

from pretrainax.config import ModelConfig
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.tokenization.base import Tokenizer, Vocabulary
from pretrainax.tokenization.directory_settings import SIDES
from pretrainax.tokenization.frames import RowFrame, SpecialTokenFrame, post_processor, probe_frame
from pretrainax.tokenization.huggingface import FIELDS
from pretrainax.tokenization.sentencepiece import SentencePieceTokenizer
from pretrainax.tokenization.subwords import SubwordTokenizer
from pretrainax.tokenization.tokenizer_json import adds_prefix_space, tokenizer_json

# The pre-tokenizer of Qwen 2, without settings that do not change ids; its normalizer is NFC.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PRE_TOKENIZER: list[JsonObject] = [
    {"type": "Split", "pattern": {"Regex": _QWEN2_PATTERN}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
]


def write_tokenizer(
    tokenizer: Tokenizer,
    directory: str,
    model: ModelConfig,
    chat_template: Optional[str] = None,
    decoder_frame: Optional[SpecialTokenFrame] = None,
) -> None:
    """Writes a Hugging Face directory from which AutoTokenizer loads a tokenizer with the same ids for every text.

    The only exceptions are special pieces within a text ("<s>", "[MASK]"). PretrainAX encodes them as ordinary
    characters, whereas transformers encodes them as special ids unless `split_special_tokens=True`.

    AutoTokenizer also adds the same special tokens around a text or a pair as the tokenizer that was imported
    (`Vocabulary.frame`). Newly trained tokenizers get the special tokens with which `model` was trained: [CLS] … [SEP]
    for an encoder, … </s> for an encoder-decoder, and `decoder_frame` for a decoder.

    Args:
      model: config of the model that uses the tokenizer.
      chat_template: the Jinja chat template to write, or None to write none.
      decoder_frame: the special tokens that a decoder reads around a text; None: it reads none.
    """
    os.makedirs(directory, exist_ok=True)
    pieces, vocabulary = tokenizer.special_pieces, tokenizer.vocabulary
    special_tokens = {f"{field}_token": pieces[i] for field in FIELDS if (i := getattr(vocabulary, field)) is not None}
    if vocabulary.sentinels:
        special_tokens["additional_special_tokens"] = [pieces[i] for i in vocabulary.sentinels]
    token_types = ["token_type_ids"] if model.num_token_types > 1 else []
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # this class uses tokenizer.json without changes
        "model_input_names": ["input_ids", *token_types, "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **special_tokens,
        **{name: "left" for name in SIDES if name in vocabulary.left_sides},
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    if model.position.max_length is not None:
        config["model_max_length"] = model.position.max_length
    if not isinstance(tokenizer, SubwordTokenizer):
        tokenizer.save(directory)  # for `read_tokenizer`
    if isinstance(tokenizer, SentencePieceTokenizer) and model.family == "decoder":
        # llama.cpp's converter reads both, as in the releases of LLaMA.
        _write(directory, "tokenizer.model", tokenizer.model)
        config["add_prefix_space"] = adds_prefix_space(tokenizer)
    usual_frame = decoder_frame if model.family == "decoder" else _usual_frame(vocabulary)
    _write(directory, "tokenizer.json", _with_frame(tokenizer, usual_frame))
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special_tokens)):
        _write(directory, name, (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode())


def loader(directory: str) -> str:
    """Returns the transformers class that loads the tokenizer of an export with the same ids.

    NOTE The class is AutoTokenizer, except for model_type qwen2. AutoTokenizer of transformers 5 loads all tokenizers
    of this type as Qwen2Tokenizer. This class uses the normalizer and pre-tokenizer of Qwen 2, and ignores the
    normalizer and pre-tokenizer in tokenizer.json.
    """
    if read_object(os.path.join(directory, "config.json")).get("model_type") != "qwen2":
        return "AutoTokenizer"
    description = read_object(os.path.join(directory, "tokenizer.json"))
    steps = (description["pre_tokenizer"] or {}).get("pretokenizers", ())
    steps = [{name: value for name, value in step.items() if name != "trim_offsets"} for step in steps]
    is_qwen2 = description["normalizer"] == {"type": "NFC"} and steps == _QWEN2_PRE_TOKENIZER
    return "AutoTokenizer" if is_qwen2 else "PreTrainedTokenizerFast"


def _write(directory: str, name: str, content: bytes) -> None:
    with open(os.path.join(directory, name), "wb") as f:
        f.write(content)


def _with_frame(tokenizer: Tokenizer, usual_frame: Optional[SpecialTokenFrame]) -> bytes:
    """Returns the content of a tokenizer.json whose post-processor adds special tokens around a text.

    The special tokens are `Vocabulary.frame`. If it is None, an existing post-processor is left unchanged, and a new
    one adds `usual_frame`.
    """
    model, vocabulary = tokenizer_json(tokenizer), tokenizer.vocabulary
    converted, description = tokenizers.Tokenizer.from_buffer(model), json.loads(model)
    frame = vocabulary.frame
    if frame is None and description["post_processor"] is None:
        frame = usual_frame
    if frame is None or frame == probe_frame(converted):
        return model
    if description["post_processor"] is None:
        for token in description["added_tokens"]:
            token["lstrip"] |= token["id"] == vocabulary.mask  # in masked inputs, the mask replaces the space before it
    description["post_processor"] = post_processor(frame, {i: converted.id_to_token(i) or "" for i in frame.ids})
    return json.dumps(description, ensure_ascii=False).encode()


def _usual_frame(vocabulary: Vocabulary) -> Optional[SpecialTokenFrame]:
    """Returns the usual special tokens of an encoder or encoder-decoder; None if the vocabulary lacks them."""
    ids = (vocabulary.cls, vocabulary.sep, vocabulary.eos)
    cls, sep, eos = (() if i is None else (i,) for i in ids)
    if cls and sep:
        if sep == eos:  # RoBERTa, BART
            return SpecialTokenFrame(RowFrame(cls, (), sep), RowFrame.typed(cls, sep + sep, sep, (0,) * 6))
        return SpecialTokenFrame(RowFrame(cls, (), sep), RowFrame(cls, sep, sep))
    return SpecialTokenFrame(RowFrame((), (), eos), RowFrame.typed((), eos, eos, (0,) * 4)) if eos else None
