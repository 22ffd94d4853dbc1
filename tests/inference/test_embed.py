"""Embeddings equal the pooled hidden states of transformers, and do not depend on the other inputs of the batch."""

import dataclasses
import json

import numpy as np
import pytest

from pretrainax import models
from pretrainax.config import UserError
from pretrainax.data.objectives import CausalLM, Denoising, SequentialDenoising
from pretrainax.data.sources import TextFiles
from pretrainax.inference.embed import embed, last_hidden, pooled
from pretrainax.inference.framing import framed_rows
from pretrainax.inference.load import load
from pretrainax.interop.directories import import_directory
from pretrainax.layers.compute import Compute
from pretrainax.models import electra
from pretrainax.tasks import Retrieval
from tests.golden import CASES, make
from tests.golden.case import LENGTHS, batch, weights
from tests.golden.electra import joint
from tests.support.huggingface_weights import write_directory
from tests.support.loaded import loaded_case

HIDDEN = ["bert", "roberta", "albert", "modernbert", "deberta_v3", "electra_small", "gpt2", "llama2", "bart", "t5_1_1"]
TEXTS = ["a cat sat", "b", "the cat sat there.", "dog"]  # each letter is a token
CLOSE = 1e-5  # float32 sums in another order, of values of about 1


def embedded_alone(name: str, row: list[int], pooling="mean") -> np.ndarray:
    return pooled(loaded_case(name), [np.array(row, np.int32)], pooling)[0]


@pytest.mark.first(4)
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_states_are_those_of_transformers(name):
    arrays, golden = batch(CASES[name]), make.golden(name)
    side = "decoder" if CASES[name].config.family == "decoder" else "encoder"
    real = arrays["encoder_segment_ids" if "encoder_tokens" in arrays else "segment_ids"] > 0
    hidden = np.asarray(loaded_case(name).run(last_hidden, arrays))
    # As in tests/zoo/test_parity.py: the float32 sums have another order.
    np.testing.assert_allclose(hidden[real], golden[f"hidden {side}"][-1][real], atol=2e-4, rtol=0)


def test_a_vector_is_what_its_pooling_makes_of_the_real_tokens():
    arrays, hidden = batch(CASES["gpt2"]), make.golden("gpt2")["hidden decoder"][-1]
    rows = [tokens[:n] for tokens, n in zip(arrays["tokens"], LENGTHS, strict=True)]
    of = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1], "max": lambda x: x.max(0)}
    for pooling, expected in of.items():
        wanted = [expected(states[:n]) for states, n in zip(hidden, LENGTHS, strict=True)]
        np.testing.assert_allclose(pooled(loaded_case("gpt2"), rows, pooling), wanted, atol=2e-4, rtol=0)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5_1_1"])
def test_a_vector_does_not_depend_on_the_other_texts(name):
    together = embed(loaded_case(name), TEXTS)
    assert together.dtype == np.float32 and together.shape == (len(TEXTS), CASES[name].config.d_model)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(embed(loaded_case(name), [text])[0], vector, atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    "name, objective, before, after",
    [
        ("bert", None, ["cls"], ["sep"]),
        ("t5_1_1", None, [], ["eos"]),
        ("t5_1_1", SequentialDenoising(mode="n."), ["n", "."], ["eos"]),
        ("bart", Denoising(), ["bos"], ["eos"]),
    ],
)
def test_what_stands_around_a_text_stood_there_in_training(name, objective, before, after):
    model = loaded_case(name)
    experiment = dataclasses.replace(model.experiment, objective=objective or model.experiment.objective)
    model = dataclasses.replace(model, experiment=experiment)
    vocabulary, encode = model.tokenizer.vocabulary, model.tokenizer.encode
    ids = [[getattr(vocabulary, s) if len(s) > 1 else int(encode(s)[0]) for s in side] for side in (before, after)]
    before, after = ids
    row = [*before, *model.tokenizer.encode("a cat").tolist(), *after]
    np.testing.assert_allclose(embed(model, ["a cat"])[0], embedded_alone(name, row), atol=CLOSE, rtol=0)


def test_the_first_token_of_an_encoder_is_its_cls():
    vocabulary = loaded_case("bert").tokenizer.vocabulary
    row = [vocabulary.cls, *loaded_case("bert").tokenizer.encode("a cat").tolist(), vocabulary.sep]
    wanted = embedded_alone("bert", row, "cls")
    np.testing.assert_allclose(embed(loaded_case("bert"), ["a cat"], "cls")[0], wanted, atol=CLOSE, rtol=0)


@pytest.mark.slow
def test_a_run_of_electra_embeds_with_its_discriminator():
    config, plain = joint(), loaded_case("electra_small")
    both, params = models.build(config, Compute()), weights(config)
    experiment = dataclasses.replace(plain.experiment, model=config)
    run = dataclasses.replace(plain, model=both, params=params, experiment=experiment)
    own, of_own = electra.discriminator(config, params)
    alone = dataclasses.replace(plain, model=models.build(own, Compute()), params=of_own)
    np.testing.assert_allclose(embed(run, ["a cat"]), embed(alone, ["a cat"]), atol=CLOSE, rtol=0)


def test_eight_devices_embed_as_one():
    spread = loaded_case("bert", data=4, fsdp=2)
    np.testing.assert_allclose(embed(spread, TEXTS), embed(loaded_case("bert"), TEXTS), atol=CLOSE, rtol=0)


def test_a_text_that_is_too_long_is_cut_where_that_is_asked_for_alone():
    model = loaded_case("bert")  # 20 positions
    with pytest.raises(UserError, match=r"texts\[1\] is 19 tokens, .* reads at most 18 and 2 special ones: .*truncate"):
        embed(model, ["a", "a" * 19])
    np.testing.assert_allclose(embed(model, ["ab" * 20], truncate=True), embed(model, ["ab" * 9]), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("truncate", (False, True))
def test_a_limit_below_the_special_tokens_is_named(truncate):
    with pytest.raises(UserError, match="at most 1 token, but 2 special tokens surround each text: raise its maximum"):
        framed_rows(loaded_case("bert"), ["a cat"], truncate, limit=1)
    (row,) = framed_rows(loaded_case("bert"), ["a cat"], truncate=True, limit=2)
    assert len(row) == 2
    # Relative position buckets do not limit the length.
    assert embed(loaded_case("t5_1_1"), ["a" * 40]).shape == (1, 16)


@pytest.mark.parametrize(
    "name, texts, options, said",
    [
        ("bert", "a text", {}, "write \\[text\\]"),
        ("bert", ["a"], {"pooling": "sum"}, "pooling is 'sum', it must be one of mean, cls, last, max"),
        ("gpt2", ["a"], {"pooling": "cls"}, "reads no \\[CLS\\] before a text: take mean, last or max"),
        ("t5_1_1", ["a"], {"pooling": "cls"}, "reads no \\[CLS\\]"),
    ],
)
def test_a_mistake_is_one_line(name, texts, options, said):
    with pytest.raises(UserError, match=said) as e:
        embed(loaded_case(name), texts, **options)
    assert "\n" not in str(e.value)


def test_a_text_without_tokens_is_refused_where_nothing_stands_before_it():
    model = loaded_case("gpt2")
    data = dataclasses.replace(model.experiment.data, source=TextFiles(path="."))
    run = dataclasses.replace(model.experiment, data=data, objective=CausalLM(mask_documents=True))
    with pytest.raises(UserError, match=r"texts\[1\] is '', which has no tokens"):
        embed(dataclasses.replace(model, experiment=run), ["a", ""])
    vocabulary = model.tokenizer.vocabulary  # an imported model begins the text with <s>
    np.testing.assert_allclose(embed(model, [""])[0], embedded_alone("gpt2", [vocabulary.bos]), atol=CLOSE, rtol=0)


def test_of_no_texts_there_are_no_vectors():
    assert embed(loaded_case("bert"), []).shape == (0, 16)


# --- models of sentence-transformers ----------------------------------------------------------------------------------

CLS_OF_OLD_FILES = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def write_modules(directory, pooling, names=("Transformer", "Pooling")):
    paths = ["" if name == "Transformer" else f"{i}_{name}" for i, name in enumerate(names)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    for path in filter(None, paths):
        (directory / path).mkdir(exist_ok=True)
        (directory / path / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    "name, pooling, names",
    [
        ("bert", CLS_OF_OLD_FILES, ("Transformer", "Pooling", "Normalize")),
        ("bert", {"embedding_dimension": 16, "pooling_mode": "max"}, ("Transformer", "Pooling")),
        ("llama2", {"embedding_dimension": 16, "pooling_mode": "lasttoken"}, ("Transformer", "Pooling", "Normalize")),
    ],
    ids=["cls", "max", "last"],
)
def test_a_model_of_sentence_transformers_has_its_vectors(name, pooling, names, tmp_path):
    theirs = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    directory = write_directory(tmp_path / "model", name)
    write_modules(directory, pooling, names)
    expected = theirs.SentenceTransformer(str(directory), device="cpu").encode(TEXTS)
    import_directory(str(directory), str(tmp_path / "run"))
    for model in ("model", "run"):
        np.testing.assert_allclose(load(tmp_path / model).embed(TEXTS), expected, atol=2e-4, rtol=0)  # as above


@pytest.mark.parametrize(
    "file, content",
    [
        ("sentence_bert_config.json", {"max_seq_length": 6, "do_lower_case": True}),
        ("sentence_roberta_config.json", {"max_seq_length": 6, "do_lower_case": True}),
        ("sentence_bert_config.json", {"max_seq_length": 6}),
        ("tokenizer_config.json", {"model_max_length": 6}),  # as sentence-transformers 6 stores it
    ],
)
def test_a_model_of_sentence_transformers_reads_as_much_of_a_text_as_there(file, content, tmp_path):
    """The maximum length may be smaller than the model's, and inputs may be converted to lower case."""
    theirs = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    directory = write_directory(tmp_path / "model")
    write_modules(directory, {"embedding_dimension": 16, "pooling_mode": "mean"})
    stored = json.loads((directory / file).read_text()) if (directory / file).exists() else {}
    (directory / file).write_text(json.dumps(stored | content))
    texts = ["the Cat sat There", "the Dog", "tHe"]
    expected = theirs.SentenceTransformer(str(directory), device="cpu").encode(texts)
    import_directory(str(directory), str(tmp_path / "run"))
    for model in (load(tmp_path / "model"), load(tmp_path / "run")):
        np.testing.assert_allclose(model.embed(texts, truncate=True), expected, atol=2e-4, rtol=0)  # as above
        with pytest.raises(
            UserError, match=r"texts\[0\] is 17 tokens, .* reads at most 4 and 2 special ones: shorten it, or"
        ):
            model.embed(texts)
        # This call reads the whole text.
        assert not np.allclose(model.embed(texts, "mean")[0], expected[0], atol=2e-4, rtol=0)


def test_a_saved_model_of_sentence_transformers_needs_no_pretraining_heads(tmp_path):
    theirs = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    directory = write_directory(tmp_path / "model")
    names = ("Transformer", "Pooling", "Normalize")
    write_modules(directory, {"embedding_dimension": 16, "pooling_mode": "mean"}, names)
    model = theirs.SentenceTransformer(str(directory), device="cpu")
    model.save(str(tmp_path / "saved"))  # as a BertModel
    loaded = load(tmp_path / "saved")
    np.testing.assert_allclose(loaded.embed(TEXTS), model.encode(TEXTS), atol=2e-4, rtol=0)  # as above
    assert isinstance(loaded.experiment.objective, Retrieval)


@pytest.mark.parametrize("content", ['{"max_seq_length": 0}', '{"max_seq_length": true}', '{"do_lower_case": "yes"}'])
def test_an_invalid_length_or_case_is_one_line(content, tmp_path):
    directory = write_directory(tmp_path / "model")
    write_modules(directory, {"pooling_mode": "mean"})
    (directory / "sentence_bert_config.json").write_text(content)
    with pytest.raises(UserError, match="sentence_bert_config.json has max_seq_length .*: they must be a positive"):
        load(str(directory)).embed(TEXTS)


@pytest.mark.parametrize(
    "pooling, names, message",
    [
        (
            {"pooling_mode": "mean"},
            ("Transformer", "Pooling", "Dense"),
            "has the modules Transformer, Pooling, Dense, of",
        ),
        ({"pooling_mode": ["cls", "mean"]}, ("Transformer", "Pooling"), "has the pooling cls and mean: set pooling to"),
        ({"pooling_mode_weightedmean_tokens": True}, ("Transformer", "Pooling"), "pooling weightedmean_tokens: set"),
    ],
)
def test_modules_that_are_not_supported_are_one_line_unless_the_pooling_is_given(pooling, names, message, tmp_path):
    directory = write_directory(tmp_path / "model")
    write_modules(directory, pooling, names)
    loaded = load(str(directory))
    with pytest.raises(UserError, match=message):
        loaded.embed(TEXTS)
    assert loaded.embed(TEXTS, pooling="mean").shape == (4, 16)
    write_modules(directory, {"pooling_mode": "mean"})
    (directory / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    with pytest.raises(UserError, match="has default_prompt_name 'query', which is not supported: write the prompt"):
        loaded.embed(TEXTS)
    (directory / "modules.json").write_text('[{"type": 3}]')
    with pytest.raises(UserError, match="modules.json is damaged"):
        loaded.embed(TEXTS)
