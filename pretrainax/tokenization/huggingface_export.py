"""Writes tokenizers as Hugging Face directories, from which transformers loads a tokenizer with the same token ids."""

import json
import os
from typing import Optional

from tokenizers import processors

from pretrainax.config import ModelConfig
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.huggingface import FIELDS
from pretrainax.tokenization.subwords import SubwordTokenizer
from pretrainax.tokenization.tokenizer_json import tokenizer_json


def write_tokenizer(
    tokenizer: Tokenizer, directory: str, model: ModelConfig, chat_template: Optional[str] = None
) -> None:
    """Writes a Hugging Face directory from which AutoTokenizer loads a tokenizer with the same ids for every text.

    The only exceptions are special pieces within a text, such as "<s>" or "[MASK]". PretrainAX encodes them as ordinary
    characters, whereas transformers encodes them as special ids unless `split_special_tokens=True`.

    A tokenizer.json that already has rules for adding special tokens around a text is written unchanged. All other
    tokenizers, such as newly trained ones, get the usual rules for `model`: [CLS] … [SEP] for an encoder, … </s> for an
    encoder-decoder, <s> … for a decoder. Qwen 2 is the only `model_type` for which AutoTokenizer ignores these rules
    and uses rules in its own code.

    Args:
      model: config of the model that uses the tokenizer.
      chat_template: the Jinja chat template to write, or None to write none.
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
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    if model.position.max_length is not None:
        config["model_max_length"] = model.position.max_length
    if not isinstance(tokenizer, SubwordTokenizer):
        tokenizer.save(directory)  # for `read_tokenizer`
    _write(directory, "tokenizer.json", _with_template(tokenizer, model))
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special_tokens)):
        _write(directory, name, (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode())


def _write(directory: str, name: str, content: bytes) -> None:
    with open(os.path.join(directory, name), "wb") as f:
        f.write(content)


def _with_template(tokenizer: Tokenizer, architecture: ModelConfig) -> bytes:
    """Returns the content of a tokenizer.json with a post-processor, which adds special tokens around a text.

    An existing post-processor is left unchanged. The special tokens of a new one depend on the vocabulary and on the
    family of `architecture`. Without suitable special ids, no post-processor is added.
    """
    model, v = tokenizer_json(tokenizer), tokenizer.vocabulary
    description = json.loads(model)
    if description["post_processor"] is not None:
        return model
    for token in description["added_tokens"]:
        token["lstrip"] |= token["id"] == v.mask  # in masked inputs, the mask also replaces the space before a word
    if v.cls is not None and v.sep is not None:
        cls, sep = tokenizer.special_pieces[v.cls], tokenizer.special_pieces[v.sep]
        single, pair = f"{cls}:0 $A:0 {sep}:0", f" $B:1 {sep}:1"
        if v.sep == v.eos:  # RoBERTa, BART
            pair = f" {sep}:0 $B:0 {sep}:0"
        pair = single + pair
    elif architecture.family == "encoder_decoder" and v.eos is not None:
        eos = tokenizer.special_pieces[v.eos]
        single, pair = f"$A:0 {eos}:0", f"$A:0 {eos}:0 $B:0 {eos}:0"
    elif v.bos is not None and v.bos != v.eos:
        bos = tokenizer.special_pieces[v.bos]
        single, pair = f"{bos}:0 $A:0", f"{bos}:0 $A:0 $B:1"
    else:
        return model
    special_tokens = [(piece, i) for i, piece in tokenizer.special_pieces.items()]
    template = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special_tokens)
    description["post_processor"] = json.loads(template.__getstate__())
    return json.dumps(description, ensure_ascii=False).encode()
