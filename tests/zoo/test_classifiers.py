"""Heads for rows, words and answers compute the same as transformers' classes: logits, gradients, names."""

import dataclasses

import numpy as np
import pytest

from pretrainax.config import Classify, Extract, HeadConfig, ModelConfig, Tag, UserError
from pretrainax.inference.verification.reference import model_inputs
from pretrainax.interop.architectures import described_model
from pretrainax.models.heads.extract import FORBIDDEN_LOGIT
from pretrainax.zoo.family import differences, without_heads
from tests.golden import CASES
from tests.golden.case import Case, batch, needs_transformers
from tests.support.heads import EOS, assert_same_gradients, gradients_of, oracle, ours_of
from tests.support.tiers import few

NAMES = [
    *(
        "bert",
        "distilbert",
        "roberta",
        "longformer",
        "bigbird_pairs",
        "electra_small",
        "albert",
        "deberta",
        "modernbert",
    ),
    *("gpt2", "llama3", "bart", "t5_1_1"),
]
OF_WORDS = "bert roberta longformer bigbird_pairs electra_small albert deberta modernbert gpt2 llama3 t5_1_1".split()


def with_head(name: str, kind: type[HeadConfig] = Classify) -> Case:
    """Returns a case of the zoo with the head of its class of this kind."""
    case = CASES[name]
    found = case.family.huggingface.classifier_of(kind())
    asked = {Classify: {"num_labels": 3, "kind": "single"}, Tag: {"num_labels": 3}, Extract: {}}
    head = dataclasses.replace(found.head, **asked[kind])
    config = dataclasses.replace(found.apply_to(without_heads(case.config)), head=head)
    config.family = found.family or config.family
    return Case(config, case.family, pad_id=case.pad_id)


def rows(case: Case) -> dict[str, np.ndarray]:
    """Returns a batch with labels; an encoder-decoder decodes the tokens of its encoder, shifted by one."""
    names = ("tokens", "segment_ids", "positions", "token_types")
    found = {name: x for name, x in batch(case._replace(config=encoder_of(case))).items() if name in names}
    if case.config.family == "encoder_decoder":
        lengths = found["segment_ids"].sum(1)
        found["tokens"][np.arange(len(lengths)), lengths - 1] = EOS
        shifted = np.roll(found["tokens"], 1, axis=1)
        shifted[:, 0] = EOS if case.family.name == "BART" else case.pad_id
        found |= {f"encoder_{name}": x for name, x in found.items()} | {"tokens": shifted}
    if isinstance(case.config.head, Extract):
        return asked(case, found) | {"span": np.array([[4, 6], [0, 0], [3, 4]], np.int32)}
    if isinstance(case.config.head, Tag):
        return found | {"word_labels": np.random.RandomState(1).randint(0, 3, found["tokens"].shape).astype(np.int32)}
    return found | {"labels": np.array([2, 0, 1], np.int32)}


# Families whose classes search for the end of the question: id of the separator, positions of separators after it.
SEPARATORS = {"Longformer": (2, (2, 3)), "BigBird": (66, (2,))}


def asked(case: Case, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Converts the rows to questions of one token with passages, framed as in pretraining.

    The frames are <s> q </s></s> p </s> for Longformer, and [CLS] q [SEP] p [SEP] for BigBird.
    """
    if case.family.name not in SEPARATORS:
        return found
    (sep, between), real = SEPARATORS[case.family.name], found["segment_ids"] > 0
    tokens, places = np.where(found["tokens"] == sep, sep + 1, found["tokens"]), found["positions"]
    ends = places == real.sum(1, keepdims=True) - 1
    tokens = np.where(np.isin(places, between) | ends, sep, tokens).astype(np.int32)
    types = {"token_types": (places > 2).astype(np.int32)} if case.config.num_token_types > 1 else {}
    return found | types | {"tokens": tokens, "question": (places < 2).astype(np.int32)}


def encoder_of(case: Case):
    config = dataclasses.replace(case.config, head=None, masked_lm_head=True)
    return dataclasses.replace(config, family="encoder") if config.family == "encoder_decoder" else config


def theirs_of(case: Case, model, arrays):
    import torch

    t = {name: torch.from_numpy(x.astype(np.int64)) for name, x in arrays.items()}
    given = model_inputs(case.config, model, arrays)
    if "span" in t:
        return (*answers_of(model(**given), t), gradients_of(model, case))
    labels = t["labels"] if "labels" in t else torch.where(t["segment_ids"] > 0, t["word_labels"], -100)
    out = model(**given, labels=labels)
    out.loss.backward()
    return out.logits.detach().numpy(), out.loss.item(), gradients_of(model, case)


def answers_of(out, t):
    """Returns their logits for the start and end of an answer, and a loss without padding."""
    import torch

    logits = torch.stack([out.start_logits, out.end_logits], dim=1)  # [B, 2, T]
    real = t["segment_ids"][:, None] > 0
    loss = torch.nn.functional.cross_entropy(logits.masked_fill(~real, -1e9).flatten(0, 1), t["span"].flatten())
    loss.backward()
    logits = torch.where(
        logits < -9e5, FORBIDDEN_LOGIT, logits
    )  # BigBird subtracts a million from the logits of positions where no answer is allowed
    return logits.swapaxes(1, 2).detach().numpy(), loss.item()


@pytest.mark.first(1)
@needs_transformers
@pytest.mark.parametrize("name", few(NAMES))
def test_as_transformers(name):
    compare(with_head(name))


@pytest.mark.first(1)
@needs_transformers
@pytest.mark.parametrize("name", few(OF_WORDS, ["bert", "modernbert", "longformer"]))
def test_of_words_as_transformers(name):
    compare(with_head(name, Tag))


@pytest.mark.first(1)
@needs_transformers
# BigBird's rows are long enough that it draws random blocks.
@pytest.mark.parametrize("name", few([*NAMES, "bigbird"], ["bert", "longformer", "bigbird"]))
def test_of_answers_as_transformers(name):
    compare(with_head(name, Extract))


SIBLINGS = {
    Tag: (
        "distilbert xlm_roberta eurobert gpt_neo mistral mixtral qwen2 qwen3 qwen3_moe gemma1 gemma2 "
        "phi2 phi4 smollm3 mt5"
    ).split(),
    Extract: "gpt_neo mistral mixtral qwen2 qwen3 qwen3_moe smollm3".split(),
}


@pytest.mark.first(5)
@needs_transformers
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in SIBLINGS.items() for name in names])
def test_of_their_siblings_the_names_are_the_same(kind, name):
    case = with_head(name, kind)
    oracle(case)
    assert not differences(described(case), case.config)


def test_a_class_of_the_encoder_reads_files_with_fewer_decoder_layers():
    case = with_head("t5_1_1", Tag)
    file = case.family.huggingface.write_config(case.config) | {"num_decoder_layers": 1}  # as in ByT5
    assert not differences(described_model(file)[1], case.config)


@needs_transformers
@pytest.mark.parametrize("kind", [Classify, Tag, Extract])
def test_the_hidden_layer_of_modernbert_has_the_activation_of_the_feed_forward(kind):
    case = with_head("modernbert", kind)
    config = dataclasses.replace(case.config, activation="silu")
    with pytest.raises(UserError, match="config.model.head.hidden='gelu'"):
        case.family.huggingface.write_config(config)
    compare(case._replace(config=dataclasses.replace(config, head=dataclasses.replace(config.head, hidden="model"))))


DROPOUTS = (
    "bert distilbert roberta bigbird_pairs electra_small albert deberta modernbert gpt2 gpt_neo llama3 bart t5_1_1"
)


@needs_transformers
@pytest.mark.parametrize("name", DROPOUTS.split())
def test_the_dropout_of_a_head_is_that_of_its_class(name):
    found = CASES[name].family.huggingface
    with_key = [classifier for classifier in found.classifiers if classifier.dropout.key]
    assert with_key
    for classifier in with_key:
        asked = {"num_labels": 3, "kind": getattr(classifier.head, "kind", "").replace("auto", "single")}
        asked = {field: x for field, x in asked.items() if field in vars(classifier.head)}
        head = dataclasses.replace(classifier.head, dropout_rate=0.25, **asked)
        model = dataclasses.replace(classifier.apply_to(without_heads(CASES[name].config)), head=head)
        model = dataclasses.replace(model, family=classifier.family or model.family, dropout_rate=0.125)
        file = found.write_config(model)
        assert file[classifier.dropout.key] == 0.25 and found.read_config(file).head.dropout_rate == 0.25
        assert 0.25 in head_rates(file), classifier.architecture
        for missing in ({}, {classifier.dropout.key: None} if classifier.dropout.default is None else {}):
            rest = {key: x for key, x in file.items() if key != classifier.dropout.key} | missing
            rate = found.read_config(rest).head.dropout_rate
            assert (0.125 if rate is None else rate) in head_rates(rest), classifier.architecture
            assert rate == classifier.dropout.default


def head_rates(file: dict) -> list[float]:
    """Returns the dropout rates of the class that a config.json names, outside of its base model."""
    import torch
    import transformers

    given = {key: x for key, x in file.items() if key != "model_type"}
    model = getattr(transformers, file["architectures"][0])(
        transformers.AutoConfig.for_model(file["model_type"], **given)
    )
    inner = set(model.base_model.modules())
    return [x.p for x in model.modules() if isinstance(x, torch.nn.Dropout) and x not in inner]


def test_a_model_without_a_rate_for_its_head_is_exported_with_its_own():
    """The class would use its default of 0.2 without the key, and BERT's uses the rate of the model."""
    for name, written in (("distilbert", {"seq_classif_dropout": 0.125}), ("bert", {})):
        case = with_head(name)
        config = dataclasses.replace(case.config, dropout_rate=0.125)
        file = case.family.huggingface.write_config(config)
        assert {key: x for key, x in file.items() if "classif" in key and "dropout" in key} == written


def described(case: Case) -> ModelConfig:
    """Returns the architecture that its config.json describes."""
    return case.family.huggingface.read_config(case.family.huggingface.write_config(case.config))


def compare(case: Case) -> None:
    assert not differences(described(case), case.config)
    arrays = rows(case)
    logits, loss, gradients = ours_of(case, arrays)
    their_logits, their_loss, theirs = theirs_of(case, oracle(case), arrays)
    if not isinstance(case.config.head, Classify):  # padding has no predictions
        logits, their_logits = (x[arrays["segment_ids"] > 0] for x in (logits, their_logits))
    np.testing.assert_allclose(logits, their_logits, atol=2e-4, rtol=0)
    np.testing.assert_allclose(loss, their_loss, rtol=1e-5)
    assert_same_gradients(gradients, theirs)
