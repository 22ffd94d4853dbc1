"""Compares the likelihood of a text with plain loops and with transformers, for any other rows in the batch."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import MeshConfig, RunFailed, UserError
from pretrainax.inference.load import load
from pretrainax.layers.compute import Compute
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.outputs import Outputs
from pretrainax.scoring.likelihood import score, score_examples, target_log_probabilities
from pretrainax.scoring.scoring_examples import Scoring, method_of
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.rules import tree_shardings
from tests.golden.case import needs_transformers, weights
from tests.support.huggingface_weights import write_directory
from tests.support.loaded import loaded_case

TEXTS = ["the cat sat on the mat, and then it went away.", "a", "hello there", "it is, or is not,"]
FAMILIES = ["gpt2", "bert_masked_lm", "t5_1_0"]
CONTEXT = {"gpt2": 12, "bert_masked_lm": 20, "t5_1_0": 30}


def texts_of(name: str) -> list[str]:
    return [text[:18] for text in TEXTS] if name == "bert_masked_lm" else TEXTS


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def said(loaded, example) -> np.ndarray:
    """Returns the logits [N, V] of one example, computed in a batch with only this row."""
    row = {name: array[None] for name, array in example.items() if name != "loss_weights"}
    return np.asarray(loaded(row).heads["lm"].logits()[0])


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_score_is_what_a_plain_loop_over_examples_and_targets_adds_up_to(name):
    loaded, context = loaded_case(name), CONTEXT[name]
    text = texts_of(name)[3]
    nats, tokens = 0.0, 0
    for example in (asked := method_of(loaded, Scoring(context)).examples_for(text)).examples:
        logs = log_softmax(said(loaded, example))
        for place, (target, weight) in enumerate(zip(example["targets"], example["loss_weights"], strict=True)):
            if weight:
                nats -= logs[place, target]
                tokens += 1
    (found,) = score(loaded, [text], context=context)
    assert found.tokens == tokens > 3 and found.nats == pytest.approx(nats, rel=1e-5)
    assert (" pieces" in found.method) == (asked.pieces > 1)
    assert found.bytes == (len(text) if name != "t5_1_0" else 3)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_has_one_score_whatever_stands_beside_it(name):
    loaded, texts, context = loaded_case(name), texts_of(name), CONTEXT[name]
    together = score(loaded, [*texts, *texts[::-1]], context=context)
    for text, found in zip(texts[:2], together, strict=False):
        (alone,) = score(loaded, [text], context=context)
        assert alone.nats == pytest.approx(found.nats, rel=1e-5, abs=1e-5)
        assert dataclasses.replace(alone, nats=0) == dataclasses.replace(found, nats=0)
    assert [s.nats for s in together] == pytest.approx([s.nats for s in together[::-1]], rel=1e-6)


@pytest.mark.slow
def test_devices_that_share_rows_and_vocabulary_give_the_same_scores():
    loaded = loaded_case("gpt2")
    config = dataclasses.replace(loaded.experiment.model, vocab_size=100)  # divisible by two devices
    params, found = weights(config), []
    for sizes in ({"data": 1}, {"data": 2, "fsdp": 2, "tensor": 2}):
        mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
        on_mesh = jax.device_put(params, tree_shardings(mesh, params))
        model = models.build(config, Compute())
        one = dataclasses.replace(loaded, model=model, params=on_mesh, mesh=mesh)
        found.append([s.nats for s in score(one, TEXTS)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
@needs_transformers
def test_a_sliding_window_gives_what_the_guide_of_transformers_computes(tmp_path):
    """Runs the guide's loop over strides (docs: Perplexity of fixed-length models), on a text that begins with BOS.

    A window of the guide also contains the tokens that it predicts, so its max_length is our context plus one.
    """
    import torch
    import transformers

    directory = str(write_directory(tmp_path / "gpt2", "gpt2"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ours = load(directory)
    for max_length, stride in ((13, 5), (20, 19), (9, 1)):
        ids = [ours.tokenizer.vocabulary.bos, *ours.tokenizer.encode(TEXTS[0])]
        nats, count, before = 0.0, 0, 0
        for begin in range(0, len(ids), stride):
            end = min(begin + max_length, len(ids))
            window = torch.tensor([ids[begin:end]], dtype=torch.long)
            labels = window.clone()
            labels[:, : -(end - before)] = -100
            with torch.no_grad():
                loss = theirs(window, labels=labels).loss
            predicted = int((labels[:, 1:] != -100).sum())
            nats, count, before = nats + float(loss) * predicted, count + predicted, end
            if end == len(ids):
                break
        (found,) = score(ours, [TEXTS[0]], context=max_length - 1, stride=stride)
        assert found.tokens == count and found.nats == pytest.approx(nats, rel=1e-5)


@pytest.mark.slow
@needs_transformers
def test_a_pseudo_log_likelihood_is_what_transformers_says_of_each_mask(tmp_path):
    import torch
    import transformers

    directory = str(write_directory(tmp_path / "bert", "bert_masked_lm"))
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(directory).eval()
    ours, text = load(directory), "a cat sat"
    vocabulary = ours.tokenizer.vocabulary
    row = [vocabulary.cls, *ours.tokenizer.encode(text), vocabulary.sep]
    masked = torch.tensor([row] * len(text))
    places = torch.arange(1, len(text) + 1)
    masked[places - 1, places] = vocabulary.mask
    with torch.no_grad():
        logs = theirs(masked).logits.log_softmax(-1)
    expected = -sum(float(logs[place - 1, place, row[place]]) for place in places)
    (found,) = score(ours, [text])
    assert found.nats == pytest.approx(expected, rel=1e-5)
    (by_word,) = score(ours, [text], by_word=True)
    assert abs(by_word.nats - found.nats) > 0.01 and by_word.tokens == found.tokens


def test_a_model_that_knows_nothing_needs_log_v_for_each_token():
    loaded = loaded_case("gpt2")
    nothing = dataclasses.replace(loaded, params=jax.tree.map(np.zeros_like, loaded.params))
    for found, text in zip(score(nothing, TEXTS), TEXTS, strict=True):
        assert found.nats == pytest.approx(len(text) * math.log(loaded.experiment.model.vocab_size), rel=1e-6)


def test_logits_exist_for_some_tokens_at_a_time():
    rows, columns, width, vocabulary = 4, 4096, 8, 4096

    def of(features, matrix, targets):
        outputs = Outputs({"lm": LanguageModelOutput(features, matrix)})
        return target_log_probabilities(outputs, {"targets": targets})

    shapes = [(rows, columns, width), (width, vocabulary), (rows, columns)]
    dtypes = [np.float32, np.float32, np.int32]
    arguments = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    memory = jax.jit(of).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * rows * columns * vocabulary / 4


def test_bad_input_is_one_line():
    with pytest.raises(UserError, match="texts is one string, it must be a list of strings"):
        score(loaded_case("gpt2"), "a text")
    with pytest.raises(UserError, match="text 1 has 46 tokens, and this encoder takes at most 18 at a time"):
        score(loaded_case("bert_masked_lm"), ["a", TEXTS[0]])
    loaded = loaded_case("gpt2")
    diverged = dataclasses.replace(loaded, params=jax.tree.map(lambda x: np.full_like(x, np.nan), loaded.params))
    with pytest.raises(RunFailed, match="not finite numbers; did the run diverge"):
        score(diverged, ["a"])


def test_no_text_has_no_tokens():
    assert score(loaded_case("gpt2"), []) == []
    for name in ("gpt2", "bert_masked_lm"):
        (empty,) = score(loaded_case(name), [""])
        assert (empty.nats, empty.tokens, empty.bytes) == (0.0, 0, 0)


def test_another_checkpoint_is_asked_by_what_is_compiled_with_its_own_parameters():
    loaded, traced = loaded_case("gpt2"), []
    other = dataclasses.replace(loaded, params=jax.tree.map(lambda x: x * 0.5, loaded.params))

    def question(outputs, batch):
        traced.append(batch)
        return outputs.heads["lm"].features.sum()

    row = {name: np.ones((1, 4), np.int32) for name in ("tokens", "positions", "segment_ids")}
    first, second = loaded.compute(question, row), other.share_compiled(loaded).compute(question, row)
    assert float(first) != float(second) == float(dataclasses.replace(other).compute(question, row))
    assert len(traced) == 2  # The model that did not share compiled functions traces again.
    wider = models.build(dataclasses.replace(loaded.model.config, norm_epsilon=1.0), loaded.model.compute)
    phase = dataclasses.replace(loaded, model=wider)
    alone = dataclasses.replace(phase).compute(question, row)
    assert float(phase.share_compiled(loaded).compute(question, row)) == float(alone) != float(first)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_that_are_likeliest_are_counted_among_targets_alone(name):
    """A batch has texts of several lengths; the padding of shorter rows is no target, whatever the model predicts."""
    loaded, context = loaded_case(name), CONTEXT[name]
    method = method_of(loaded, Scoring(context))
    examples = [example for text in texts_of(name) for example in method.examples_for(text).examples]
    expected = []
    for example in examples:
        best, weighted = said(loaded, example).argmax(-1), np.asarray(example["loss_weights"]) > 0
        expected.append((int(weighted.sum()), int(((best == example["targets"]) & weighted).sum())))

    found = {answer.number: (answer.tokens, answer.best) for answer in score_examples(loaded, enumerate(examples))}
    assert [found[number] for number in range(len(examples))] == expected
    output = jax.tree.map(jnp.zeros_like, loaded.params)
    blank = dataclasses.replace(loaded, params=output)  # All logits are equal, so each token is one of the likeliest.
    for answer in score_examples(blank, enumerate(examples)):
        assert answer.best == answer.tokens == expected[answer.number][0]
