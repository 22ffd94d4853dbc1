"""`generate` = the argmax of an uncached forward pass = transformers' `generate`, from the same directory.

The cases are all families with a decoder times all scalings of rotary positions. Prompts end before, at and after each
length to which batches are padded. Their tokens pass the old context of a scaling in the prompt, in the generated text,
or never.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import zoo
from pretrainax.config import (
    LinearScaling,
    LongContextScaling,
    LongRopeScaling,
    MeshConfig,
    RotaryPositions,
    UserError,
    YarnScaling,
)
from pretrainax.data.batch import Lengths, is_encoder_decoder
from pretrainax.data.collate import collate
from pretrainax.inference.decoding import Sampling, generate, rules_of
from pretrainax.inference.load import load
from pretrainax.inference.prompts import read_prompt, tokens_of
from pretrainax.scoring.likelihood import score
from pretrainax.sharding.mesh import make_mesh
from tests.golden import CASES
from tests.golden.case import needs_transformers, shrunk
from tests.support.huggingface_weights import write_directory
from tests.support.tiers import few

CONTEXT, OLD, NEW = 80, 20, 9  # numbers of tokens: context, old context, generated text
# Numbers of tokens of the prompts in each batch. Batches are padded to 16, 32, 64 or 80 tokens. A prompt of 12 or 20
# tokens grows to 21 or 29.
BATCHES = ((1, 7, 12, 15, 16), (1, 2, 16, 17, 20, 21, 31, 32), (3, 33, 63, 64, 65, 76, 79))
TIE = 2e-5  # logits are about 1; float32 programs that sum in another order differ by up to 1e-5
DECODERS = {name: case for name, case in CASES.items() if case.config.family != "encoder"} | {
    family.prefix + "shrunk": shrunk(family)
    for family in zoo.FAMILIES
    if family.huggingface and family.name not in {case.family.name for case in CASES.values()}
}
SCALINGS = "none", "linear", "yarn", "llama3", "longrope"


def scaling_of(kind, pairs):
    """Returns a scaling from an old context of 20 tokens to one of 80, for heads with `pairs` rotated pairs."""
    if kind == "linear":
        return LinearScaling(CONTEXT / OLD)
    if kind == "yarn":
        return YarnScaling(CONTEXT / OLD, fast=4.0, slow=0.5, original_length=OLD)
    if kind == "llama3":
        return LongContextScaling(CONTEXT / OLD, 1.0, 4.0, original_length=OLD)
    if kind == "longrope":
        short, long = (tuple(first + step * pair for pair in range(pairs)) for first, step in ((1.0, 0.1), (1.5, 2.5)))
        return LongRopeScaling(short, long, factor=CONTEXT / OLD, original_length=OLD)
    return None


def scaled(name, kind=None):
    """Returns a case with a context of 80 tokens and a scaling of the rotary positions; None keeps the positions."""
    case = DECODERS[name]
    position = case.config.position
    if position.max_length is not None:
        position = dataclasses.replace(position, max_length=CONTEXT)
    if kind is not None:
        pairs = position.rotated_dims(case.config.position_dim) // 2
        position = dataclasses.replace(position, scaling=scaling_of(kind, pairs))
    return case._replace(config=dataclasses.replace(case.config, position=position))


def is_rotary(name):
    return isinstance(DECODERS[name].config.position, RotaryPositions)


def written(directory, name, kind=None):
    """Writes a directory, and loads it with `load`."""
    write_directory(directory, scaled(name, kind))
    return load(directory, "float32", make_mesh(MeshConfig(data=1), jax.devices()[:1]))


def prompt_of(loaded, count, seed=0):
    """Returns random letters that the model encodes as `count` tokens, or one letter if that needs more tokens."""
    fewest = tokens_of(read_prompt("a", loaded.experiment, loaded.tokenizer))
    seed = zlib.crc32(f"{count} {seed}".encode())
    letters = np.random.default_rng(seed).choice(list("abcdefghijklmnopqrstuvwxyz .,"), max(count - fewest, 0) + 1)
    return "".join(letters)


# --- the two oracles -------------------------------------------------------------------------------------------------


def extended(example, ids):
    """Returns an example whose decoder has also read `ids`."""
    tokens = np.concatenate([example["tokens"], np.array(ids, np.int32)])
    count = np.arange(len(tokens), dtype=np.int32)
    return {**example, "tokens": tokens, "positions": count, "segment_ids": np.ones_like(count)}


def uncached(loaded, pairs):
    """Returns the logits of allowed tokens, after each prompt with each prefix of its generated text: [N, V] each."""
    rows = [[extended(example, ids[: min(n, len(ids) - 1)])] for example, ids in pairs for n in range(NEW)]
    arrays = collate(rows, Lengths(CONTEXT, CONTEXT, CONTEXT), 0)
    with jax.default_matmul_precision("highest"):
        logits = loaded.compute(_last_logits, arrays)
    logits = np.where(np.asarray(rules_of(loaded, Sampling()).allowed), logits, -np.inf)
    return [logits[number * NEW :][: len(ids)] for number, (_, ids) in enumerate(pairs)]


def _last_logits(outputs, batch):
    last = batch["segment_ids"].sum(1) - 1
    return jnp.take_along_axis(outputs.heads["lm"].logits(), last[:, None, None], axis=1)[:, 0]


def transformers_of(directory):
    import transformers

    two = {"bart", "marian", "t5", "mt5", "umt5", "switch_transformers", "t5gemma"}
    config = transformers.AutoConfig.from_pretrained(directory)
    cls = transformers.AutoModelForSeq2SeqLM if config.model_type in two else transformers.AutoModelForCausalLM
    model = cls.from_pretrained(directory, dtype="float32", attn_implementation="eager").eval()
    model.generation_config.forced_eos_token_id = None  # BART only: it would force the end at the maximum length
    return model


def theirs(model, loaded, example, most=NEW, **options):
    """Returns the text that transformers generates after one prompt.

    Two kinds of models run without a cache. LongRoPE in classes other than Phi-3: only Phi-3 computes the keys again.
    Switch with a deeper decoder: its cache has only as many layers as the encoder.
    """
    import torch
    import transformers

    two, vocabulary = is_encoder_decoder(example), loaded.tokenizer.vocabulary
    settings = transformers.GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=list(loaded.end_tokens),
        pad_token_id=vocabulary.pad,
        decoder_start_token_id=int(example["tokens"][0]) if two else None,
        suppress_tokens=list(range(vocabulary.size, loaded.experiment.model.vocab_size)),
        use_cache=_has_cache(model, loaded.experiment.model),
        **options,
    )
    ids = torch.from_numpy(example["encoder_tokens" if two else "tokens"].astype(np.int64))[None]
    with torch.no_grad():
        rows = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return [row[1 if two else ids.shape[1] :].tolist() for row in rows]


def _has_cache(model, config):
    if model.config.model_type == "switch_transformers":
        return config.num_decoder_layers is None
    is_long_rope = isinstance(getattr(config.position, "scaling", None), LongRopeScaling)
    return model.config.model_type == "phi3" or not is_long_rope


def agree(loaded, model):
    """Compares all batches of prompts; returns the numbers of prompts, of generated tokens, and of prompts with a tie.

    Args:
      model: a model of transformers, or None if transformers has no such class.
    """
    outcomes, texts, tokens, ties = [], 0, 0, 0
    for batch in BATCHES:
        prompts = [prompt_of(loaded, count, seed) for seed, count in enumerate(batch)]
        with jax.default_matmul_precision("highest"):
            written = generate(loaded, prompts, Sampling(max_new_tokens=NEW))
        examples = [read_prompt(prompt, loaded.experiment, loaded.tokenizer) for prompt in prompts]
        outcomes += [(example, list(text.ids)) for example, text in zip(examples, written, strict=True)]
    for (example, ids), logits in zip(outcomes, uncached(loaded, outcomes), strict=True):
        room = CONTEXT - tokens_of(example) + 1
        assert len(ids) == min(NEW, NEW if is_encoder_decoder(example) else room) or ids[-1] in loaded.end_tokens
        missing = logits.max(-1) - logits[np.arange(len(ids)), ids]
        assert missing.max() <= TIE, f"{tokens_of(example)} tokens: {missing}, {ids} instead of {logits.argmax(-1)}"
        (row,) = [ids] if model is None else theirs(model, loaded, example, len(ids))  # no text exceeds the context
        if row != ids:
            at = next(n for n, (a, b) in enumerate(zip(row, ids, strict=True)) if a != b)
            gap = logits[at, ids[at]] - logits[at, row[at]]
            assert gap <= TIE, f"{tokens_of(example)} tokens: {ids}, transformers {row}, {gap} apart"
        texts, tokens, ties = texts + 1, tokens + len(ids), ties + int(missing.max() > 0 or row != ids)
    return texts, tokens, ties


# --- the property ----------------------------------------------------------------------------------------------------

PHI3 = "phi3", "phi3_5", "phi4", "phi4_mini"
NOT_IN_TRANSFORMERS = {
    # The class of Phi-3 has only the LongRoPE scaling, and only for heads of d_model / num_heads.
    *((name, kind) for name in PHI3 for kind in ("linear", "yarn", "llama3")),
    ("phi4", "longrope"),
    ("olmo3_7b", "none"),  # its class has one theta, unless global layers are scaled
    ("t5gemma_9b_2b", "longrope"),  # its two stacks have heads of different widths, but one list of factors
}
PAIRS = [(name, kind) for name in DECODERS for kind in (SCALINGS if is_rotary(name) else (None,))]
PAIRS = [pair for pair in PAIRS if pair not in NOT_IN_TRANSFORMERS]
FAST = [("t5_1_1", None)]


@needs_transformers
@pytest.mark.parametrize("name, kind", few(PAIRS, FAST))
def test_each_text_is_the_argmax_of_a_pass_without_a_cache_and_what_transformers_writes(
    name, kind, tmp_path, one_thread
):
    loaded = written(tmp_path / "it", name, kind)
    # The class of DeepSeek is code on the Hub.
    model = None if name.startswith("deepseek_shrunk") else transformers_of(tmp_path / "it")
    texts, tokens, ties = agree(loaded, model)
    print(f"{name} {kind}: {texts} texts, {tokens} tokens, {ties} ties")
    assert ties <= 1


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("name", ["phi3_5", "phi4_mini"])
def test_beams_that_outgrow_the_old_context_are_those_of_transformers(name, tmp_path, one_thread):
    loaded, beams = written(tmp_path / "it", name, "longrope"), 3
    model, prompts = transformers_of(tmp_path / "it"), [prompt_of(loaded, count) for count in (3, 12, 15, 19, 20, 21)]
    with jax.default_matmul_precision("highest"):
        found = generate(loaded, prompts, Sampling(max_new_tokens=NEW, num_beams=beams, num_return=beams))
    for number, prompt in enumerate(prompts):
        example = read_prompt(prompt, loaded.experiment, loaded.tokenizer)
        rows = theirs(model, loaded, example, num_beams=beams, num_return_sequences=beams)
        (end,) = loaded.end_tokens
        rows = [row[: row.index(end) + 1] if end in row else row for row in rows]
        assert [list(text.ids) for text in found if text.prompt == number] == rows


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["phi3_5", "phi4_mini"], ["phi4_mini"]))
def test_a_text_and_its_score_depend_on_no_other_text_and_on_no_bucket(name, tmp_path):
    loaded = written(tmp_path / "it", name, "longrope")
    counts = 5, 12, 15, 20, 21, 33, 70
    prompts = [prompt_of(loaded, count) for count in counts]
    together = generate(loaded, prompts, Sampling(max_new_tokens=NEW))
    scores = score(loaded, prompts)
    for number, prompt in enumerate(prompts[:4]):
        (alone,) = generate(loaded, [prompt], Sampling(max_new_tokens=NEW))
        assert alone.ids == together[number].ids
        np.testing.assert_allclose(alone.log_probs, together[number].log_probs, atol=1e-5)
        (score_alone,) = score(loaded, [prompt])
        np.testing.assert_allclose(score_alone.nats, scores[number].nats, rtol=1e-5)


def test_a_scaling_whose_frequencies_grow_with_the_text_is_refused():
    """Dynamic NTK scaling computes new frequencies for each length of a text."""
    family = DECODERS["llama3"].family.huggingface
    with pytest.raises(UserError, match="rope_type 'dynamic'"):
        family.read_config({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
