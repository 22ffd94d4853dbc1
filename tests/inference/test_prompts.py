"""The model reads prompts with the special tokens of training around them; special pieces in a prompt become ids."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers

from pretrainax.config import UserError
from pretrainax.data.batch import tokens_read
from pretrainax.data.objectives import (
    UL2R,
    CausalLM,
    DecoderOnly,
    Denoising,
    FillInTheMiddle,
    ObjectiveInput,
    PrefixLM,
    SequenceToSequence,
    SequentialDenoising,
    SpanCorruption,
    TextToText,
)
from pretrainax.data.packing import BestFit
from pretrainax.data.sources import NoSource
from pretrainax.inference.prompts import batch_of, ids_of, read_prompt
from pretrainax.tokenization import PretrainedTokenizer, Words
from pretrainax.tokenization.chat import Chat
from pretrainax.tokenization.huggingface import read_tokenizer
from tests.golden.case import needs_transformers
from tests.support import huggingface_directories as directories
from tests.support import tiny
from tests.support.loaded import letters

LETTERS = letters(sentinels=10)
BOS, EOS, PAD = LETTERS.vocabulary.bos, LETTERS.vocabulary.eos, LETTERS.vocabulary.pad
AB = LETTERS.encode("ab").tolist()


def experiment(objective, packing=None, trained=True):
    family = "gpt" if "decoder" in objective.families else "t5"
    made = tiny.get_config(family)
    made.objective, made.data.packing = objective, packing
    if not trained:
        made.data.source = NoSource()
    return made


def read(objective, text="ab", **options):
    return {name: x.tolist() for name, x in read_prompt(text, experiment(objective, **options), LETTERS).items()}


def test_before_a_text_stands_what_stood_there_in_training():
    assert read(CausalLM())["tokens"] == [EOS, *AB]  # the end of the previous document
    assert read(FillInTheMiddle())["tokens"] == [EOS, *AB]
    assert read(CausalLM(mask_documents=True))["tokens"] == AB
    assert read(CausalLM(), packing=BestFit())["tokens"] == AB
    assert read(CausalLM(), trained=False)["tokens"] == [BOS, *AB]  # as its tokenizer does in transformers


def test_a_model_of_others_whose_begin_of_text_is_the_end_has_nothing_before_a_text():
    gpt2 = letters()
    same = dataclasses.replace(gpt2.vocabulary, bos=EOS)
    tokenizer = type(
        "Gpt2", (), {name: getattr(gpt2, name) for name in ("encode", "special_patterns")} | {"vocabulary": same}
    )
    of_others = experiment(CausalLM(), trained=False)
    assert read_prompt("ab", of_others, tokenizer)["tokens"].tolist() == AB
    # transformers starts an empty text with the same token.
    assert read_prompt("", of_others, tokenizer)["tokens"].tolist() == [EOS]


def test_a_prefix_is_seen_from_both_sides():
    assert read(PrefixLM())["prefix_mask"] == [1] * 3
    both = read(DecoderOnly(objective=SpanCorruption()))
    assert both["tokens"] == [*AB, EOS] and both["prefix_mask"] == [1] * 3


@pytest.mark.parametrize(
    "objective, inputs, start",
    [
        (SpanCorruption(), [*AB, EOS], PAD),
        (SequenceToSequence(), [*AB, EOS], PAD),
        (TextToText(), [*AB, EOS], PAD),
        (Denoising(), [BOS, *AB, EOS], EOS),
        (SequentialDenoising(mode="n."), [*LETTERS.encode("n.").tolist(), *AB, EOS], PAD),
        (UL2R(), [*AB, EOS], PAD),  # the prompt itself selects the mode
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_encoder_reads_a_text_as_in_training_and_the_decoder_its_start(objective, inputs, start):
    example = read(objective)
    assert example["encoder_tokens"] == inputs and example["tokens"] == [start]
    assert example["encoder_positions"] == list(range(len(inputs))) and example["positions"] == [0]


@pytest.mark.parametrize("objective", [CausalLM(), PrefixLM(), DecoderOnly(), SpanCorruption(), Denoising()])
def test_a_prompt_has_the_names_of_an_example_without_its_predictions(objective):
    text = ObjectiveInput(LETTERS.encode("some words of a text."), np.ones(21, np.int32), np.array([21]))
    example = objective.example(text, np.random.default_rng(0), LETTERS.vocabulary)
    assert set(read(objective)) == set(example) - {"targets", "loss_weights"}
    assert all(x.dtype == np.int32 for x in read_prompt("ab", experiment(objective), LETTERS).values())


def test_special_pieces_of_a_prompt_are_ids():
    sentinels, mask = LETTERS.vocabulary.sentinels, LETTERS.vocabulary.mask
    a, space = LETTERS.encode("a ").tolist()
    assert ids_of("a <extra_id_0> a <extra_id_9>", LETTERS).tolist() == [
        *(a, space, sentinels[0], space, a, space, sentinels[9])  # in this tokenizer, a space is a separate token
    ]
    assert ids_of("<mask>a <mask>[MASK]", LETTERS).tolist() == [mask, a, space, mask, mask]
    assert ids_of("a </s>a", LETTERS).tolist() == [a, space, EOS, a]
    assert ids_of("", LETTERS).tolist() == []


@pytest.mark.parametrize("sentinels, hint", [(10, "; write <extra_id_0>, <extra_id_1>, … for missing spans"), (0, "")])
def test_a_mask_that_the_vocabulary_lacks_names_the_sentinels_instead(sentinels, hint):
    tokenizer = letters(sentinels=sentinels)
    tokenizer = type(tokenizer)(
        tokenizer.model, dataclasses.replace(tokenizer.vocabulary, mask=None), tokenizer.special_pieces
    )
    with pytest.raises(UserError) as caught:
        ids_of("a [MASK] b", tokenizer)
    assert str(caught.value) == f"the vocabulary lacks [MASK]: it has no mask{hint}"


@needs_transformers
def test_special_tokens_of_a_tokenizer_json_are_the_ids_of_transformers(tmp_path):
    import transformers

    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate("▁Hiuser\n")}, []))
    library.normalizer = normalizers.Replace(" ", "▁")
    flags = {"<|end|>": "rstrip", "<|im_start|>": "", "<mark>": "lstrip", "<|im_start|>x": ""}
    library.add_special_tokens(
        [tokenizers.AddedToken(t, special=True, **({f: True} if f else {})) for t, f in flags.items()]
    )
    library.add_tokens([tokenizers.AddedToken("sis")])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ours, theirs = read_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    text = "<|im_start|>user\n Hi<|end|> \n<|im_start|>x  <mark> sis<|im_start|><|end|>"
    assert ids_of(text, ours).tolist() == theirs(text, add_special_tokens=False).input_ids
    assert ids_of("<|end|>", ours).tolist() == [library.token_to_id("<|end|>")]


@needs_transformers
@pytest.mark.parametrize(
    "settings", [{"legacy": False}, {"legacy": True}, {"tokenizer_class": "PreTrainedTokenizerFast"}]
)
def test_a_conversation_has_the_ids_of_transformers_and_of_training(settings, tmp_path):
    """Files of LLaMA 2 add a space after each special token. The class of transformers replaces this rule."""
    described = json.loads((pathlib.Path(directories.new("llama")) / "tokenizer.json").read_text())
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    described |= {"pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]}}
    pieces = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", "model_max_length": 64} | pieces | settings
    files = {"tokenizer__json": described, "tokenizer_config__json": config, "config__json": {"model_type": "llama"}}
    path = directories.directory(tmp_path / "llama", **files)
    ours, theirs = read_tokenizer(path), directories.auto(path)
    for text in ("<s>[INST] it is [/INST] so</s><s>[INST]", "a</s>\n b</s> c", "<s> a", "it</s>"):
        assert ids_of(text, ours).tolist() == theirs(text, add_special_tokens=False).input_ids, text
    trained = PretrainedTokenizer(path=path).load()
    template = "{% for m in messages %}{{ bos_token + m['role'] + '\n' + m['content'] + eos_token }}{% endfor %}"
    chat = Chat(template + "{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}", trained)
    talk = [{"role": "user", "content": "is it"}, {"role": "assistant", "content": "it is"}]
    ids, is_answer = chat.encode(talk)
    assert ids_of(chat.prompt(talk[:1]), trained).tolist() == ids[: is_answer.argmax()].tolist()


@needs_transformers
@pytest.mark.parametrize("name", ["t5", "albert", "llama", "gemma", "bert"])
def test_a_prompt_with_special_tokens_has_the_ids_of_transformers(name):
    path = directories.new(name)
    ours, theirs = read_tokenizer(path), directories.auto(path)
    end = ours.special_pieces[ours.vocabulary.separator]
    for text in (f"a b{end}c d{end} e\n", f"{end}a", f"a {end}{end}"):
        assert ids_of(text, ours).tolist() == theirs(text, add_special_tokens=False).input_ids, text


def test_a_tokenizer_of_words_reads_special_tokens_of_a_prompt():
    words = Words(vocab_size=6).build(iter(["a b c a b"]))
    end = words.special_pieces[words.vocabulary.separator]
    assert ids_of(f"a{end}b", words).tolist() == [*words.encode("a"), words.vocabulary.separator, *words.encode("b")]


def test_an_empty_prompt_is_refused_where_nothing_can_stand_in_its_place():
    assert read(CausalLM(), text="")["tokens"] == [EOS]
    assert read(CausalLM(), text="", trained=False)["tokens"] == [BOS]
    assert read(SpanCorruption(), text="")["encoder_tokens"] == [EOS]
    with pytest.raises(UserError, match="the prompt is empty, and the model was trained with nothing before a text"):
        read(CausalLM(mask_documents=True), text="")


@pytest.mark.parametrize("objective, rows", [(CausalLM(), [1, 20, 7]), (SpanCorruption(), [15, 33, 2])])
def test_a_batch_is_padded_on_the_right_to_one_of_few_lengths(objective, rows):
    side = "tokens" if isinstance(objective, CausalLM) else "encoder_tokens"
    prompts = [read_prompt("a" * n, experiment(objective), LETTERS) for n in rows]
    batch = batch_of(prompts, PAD, None)
    length = 32 if max(rows) < 32 else 64
    assert batch[side].shape == (3, length) and tokens_read(batch) == 3 * (length + (side != "tokens"))
    for row, prompt in enumerate(prompts):
        n = len(prompt[side])
        assert batch[side][row].tolist() == prompt[side].tolist() + [PAD] * (length - n)
        assert batch[side.replace("tokens", "segment_ids")][row].sum() == n
    assert batch_of(prompts, PAD, 40)[side].shape[1] == min(length, 40)
