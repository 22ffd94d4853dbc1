"""Generated tokens equal the tokens of transformers with the same weights."""

import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest

from pretrainax import models
from pretrainax.data.batch import is_encoder_decoder
from pretrainax.inference.decoding import Sampling, generate
from pretrainax.inference.prompts import read_prompt
from pretrainax.layers.compute import Compute
from tests.golden import CASES
from tests.golden.case import needs_transformers, weights
from tests.golden.encoder_decoders import fresh
from tests.golden.make import oracle
from tests.support.loaded import loaded_case
from tests.support.tiers import few

pytestmark = pytest.mark.slow

# Learned positions and alternating windows; rotary positions, a window and grouped heads; both kinds of
# encoder-decoders.
NAMES = "gpt_neo", "mistral", "phi2", "smollm3", "bart", "t5_1_1", "switch", "t5gemma_9b_2b"
PROMPTS = "the cat sat, and", "a", "no dog. i say no more"
LENGTH, CONTEXT, BEAMS = 40, 64, 3


def both(name):
    """Returns our model of a case with room for 64 positions, and the model of transformers."""
    case = CASES[name]
    position = case.config.position
    if position.max_length is not None:
        position = dataclasses.replace(position, max_length=CONTEXT)
    config = dataclasses.replace(case.config, position=position)
    case = case._replace(config=config, oracle=case.oracle and functools.partial(fresh, case.family, config))
    ours = loaded_case(name)
    experiment = dataclasses.replace(ours.experiment, model=config)
    model, params = models.build(config, Compute()), jax.device_put(weights(config))
    reference = oracle(case)
    reference.generation_config.forced_eos_token_id = None  # BART only: it would force the end at the maximum length
    tokenizer = copy.copy(ours.tokenizer)
    return dataclasses.replace(ours, experiment=experiment, model=model, params=params, tokenizer=tokenizer), reference


def theirs(model, loaded, prompt, **options):
    """Generates from one row, so that the side of the padding does not matter: [num_return, tokens]."""
    import torch
    import transformers

    example = read_prompt(prompt, loaded.experiment, loaded.tokenizer)
    vocabulary = loaded.tokenizer.vocabulary
    two = is_encoder_decoder(example)
    asked = transformers.GenerationConfig(
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=list(loaded.end_tokens),
        pad_token_id=vocabulary.pad,
        decoder_start_token_id=int(example["tokens"][0]) if two else None,
        suppress_tokens=list(range(vocabulary.size, loaded.experiment.model.vocab_size)),
        **options,
    )
    ids = torch.from_numpy(example["encoder_tokens" if two else "tokens"].astype(np.int64))[None]
    with torch.no_grad():
        rows = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked)
    return [row[1 if two else ids.shape[1] :].tolist() for row in rows]


@needs_transformers
@pytest.mark.parametrize("name", few(NAMES, ["smollm3", "t5_1_1"]))
def test_greedy_and_beams_write_what_transformers_writes(name, one_thread):
    loaded, model = both(name)
    with jax.default_matmul_precision("highest"):
        written = generate(loaded, PROMPTS, Sampling(max_new_tokens=LENGTH))[0].ids
        end = written[len(written) // 2]  # so that generation ends in the middle
        loaded.tokenizer.vocabulary = dataclasses.replace(loaded.tokenizer.vocabulary, eos=end)
        greedy = generate(loaded, PROMPTS, Sampling(max_new_tokens=LENGTH))
        beams = generate(loaded, PROMPTS, Sampling(max_new_tokens=LENGTH, num_beams=BEAMS, num_return=BEAMS))
    for number, prompt in enumerate(PROMPTS):
        (row,) = theirs(model, loaded, prompt)
        assert list(greedy[number].ids) == row
        rows = theirs(model, loaded, prompt, num_beams=BEAMS, num_return_sequences=BEAMS)
        mine = [list(text.ids) for text in beams if text.prompt == number]
        assert mine == [row[: row.index(end) + 1] if end in row else row for row in rows]


@needs_transformers
@pytest.mark.parametrize("name", few(NAMES, ["smollm3", "t5_1_1"]))
def test_a_text_ends_at_any_of_several_ends(name, one_thread):
    loaded, model = both(name)
    with jax.default_matmul_precision("highest"):
        plain = generate(loaded, PROMPTS, Sampling(max_new_tokens=LENGTH))
        # Each end token is in the middle of a different text; the last end token occurs nowhere.
        unused = next(i for i in range(loaded.tokenizer.vocabulary.size) if all(i not in text.ids for text in plain))
        ends = tuple(dict.fromkeys([*(text.ids[len(text.ids) // 2] for text in plain[:2]), unused]))
        loaded = dataclasses.replace(loaded, ends=ends)
        greedy = generate(loaded, PROMPTS, Sampling(max_new_tokens=LENGTH))
        beams = generate(loaded, PROMPTS, Sampling(max_new_tokens=LENGTH, num_beams=BEAMS, num_return=BEAMS))
    assert greedy[0].ended == "eos" and greedy[0].ids[-1] in ends
    for number, prompt in enumerate(PROMPTS):
        (row,) = theirs(model, loaded, prompt)
        assert list(greedy[number].ids) == row
        rows = theirs(model, loaded, prompt, num_beams=BEAMS, num_return_sequences=BEAMS)
        first_ends = [next((i for i, token in enumerate(row) if token in ends), len(row)) for row in rows]
        mine = [list(text.ids) for text in beams if text.prompt == number]
        assert mine == [row[: end + 1] for row, end in zip(rows, first_ends, strict=True)]
