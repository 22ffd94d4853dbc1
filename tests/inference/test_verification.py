"""`verify` finds each planted difference between a directory and its import, names it, and raises no false alarm."""

import dataclasses
import importlib.util
import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer

import pretrainax
from pretrainax.config import Classify, Extract, Tag, UserError
from pretrainax.inference import verification
from pretrainax.inference.verification import outputs, settings, tokens
from pretrainax.inference.verification.comparison import within
from pretrainax.inference.verification.subject import Subject
from pretrainax.interop import directories
from pretrainax.interop.adapters import import_adapter
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.origin import Origin
from pretrainax.tokenization.huggingface import read_tokenizer
from tests.golden import CASES
from tests.golden.case import needs_transformers
from tests.interop.test_adapters_of_peft import ALL as ADAPTERS
from tests.interop.test_adapters_of_peft import base_model, noisy
from tests.interop.test_retriever_exports import write_retriever
from tests.support.classifiers import with_head
from tests.support.huggingface_directories import MADE, NEW, new
from tests.support.huggingface_weights import PUBLISHED, stored, write_directory, write_tokenizer
from tests.support.tiers import few

pytestmark = needs_transformers
ROWS = {"logits, single rows", "logits, padded batch"}


def differing(result: verification.Verification) -> set[str]:
    return {comparison.what for comparison in result.comparisons if comparison.status == "DIFFERS"}


def skipped(result: verification.Verification) -> dict[str, str]:
    return {c.what: c.details[0] for c in result.comparisons if c.status == "not compared"}


def changed(path: pathlib.Path, *keys: str, **fields) -> None:
    """Sets fields of a JSON file, or of the object below `keys`; None removes a field."""
    content = json.loads(path.read_text()) if path.exists() else {}
    part = content
    for key in keys:
        part = part[key]
    part |= fields
    for name in [name for name, value in fields.items() if value is None]:
        del part[name]
    path.write_text(json.dumps(content))


def write_model(directory, case):
    """Writes a tiny model whose files name its special ids, so that `verify` can compare everything."""
    case = CASES[case] if isinstance(case, str) else case
    write_directory(directory, case)
    if case.family.name == "Longformer":  # its class for question answering expects three </s>
        write_tokenizer(directory, case.pad_id, template="bart")
    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = vocabulary.token_to_id("</s>")
    ids = {"eos_token_id": end, "bos_token_id": vocabulary.token_to_id("<s>")}
    if case.config.family == "encoder_decoder":
        ids["decoder_start_token_id"] = end
    separator = end if case.family.name == "Longformer" else vocabulary.token_to_id("[SEP]")
    others = {"pad_token_id": case.pad_id, "sep_token_id": separator, "dtype": "float32"}
    changed(directory / "config.json", **ids, **others)
    if case.config.family != "encoder":
        changed(directory / "generation_config.json", **ids)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Returns the directory of a model and the run into which it was imported, which are written once."""
    written = {}

    def imported_model(name: str) -> tuple[pathlib.Path, str]:
        if name not in written:
            folder = written[name] = tmp_path_factory.mktemp("verified")
            write_model(folder / "model", name)
            directories.import_directory(str(folder / "model"), str(folder / "run"))
        return written[name] / "model", str(written[name] / "run")

    return imported_model


# --- planted faults ---------------------------------------------------------------------------------------------------


def swap_letters(directory):
    path = directory / "tokenizer.json"
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    changed(path, "model", "vocab", a=vocabulary["t"], t=vocabulary["a"])


def template(kind, tokens):
    """Replaces the special tokens that the post-processor adds to a text ("single") or to a pair."""

    def change(directory):
        path = directory / "tokenizer.json"
        content = json.loads(path.read_text())
        post_processor = content["post_processor"]
        post_processor[kind] = [
            {"Sequence": {"id": x, "type_id": 0}} if x in "AB" else {"SpecialToken": {"id": x, "type_id": 0}}
            for x in tokens.split()
        ]
        path.write_text(json.dumps(content))

    return change


def file(name, **fields):
    return lambda directory: changed(directory / f"{name}.json", **fields)


def perturb(tensor):
    """Adds 1e-2 to one weight of a tensor."""

    def change(directory):
        arrays = {name: x.copy() for name, x in stored(directory).items()}
        arrays[tensor].reshape(-1)[arrays[tensor].size // 3] += 1e-2
        safetensors.numpy.save_file(arrays, directory / "model.safetensors", {"format": "pt"})

    return change


def without(tensor):
    def change(directory):
        arrays = {name: x for name, x in stored(directory).items() if name != tensor}
        safetensors.numpy.save_file(arrays, directory / "model.safetensors", {"format": "pt"})

    return change


TEXTS, PAIRS, GREEDY = {"ids of texts"}, {"ids of pairs"}, {"greedy tokens"}
# Each fault: case of the zoo, change of the directory after its import, comparisons that must differ, comparisons that
# may differ as a consequence. A changed weight, end or start may change the most probable tokens, or may not.
FAULTS = {
    "vocabulary": ("llama3", swap_letters, TEXTS | PAIRS | {"ids of special tokens spelled in texts"}, set()),
    "special tokens of a text": ("llama3", template("single", "<s> A </s>"), TEXTS, set()),
    "special tokens of a pair": ("llama3", template("pair", "<s> A B"), PAIRS, set()),
    "role of a token": ("llama3", file("tokenizer_config", pad_token="</s>"), {"special tokens"}, set()),
    "embedding": ("llama3", perturb("model.embed_tokens.weight"), ROWS, GREEDY),
    "feed-forward": ("llama3", perturb("model.layers.1.mlp.down_proj.weight"), ROWS, GREEDY),
    "norm": ("llama3", perturb("model.norm.weight"), ROWS, GREEDY),
    "encoder": ("t5_1_1", perturb("encoder.block.0.layer.0.SelfAttention.v.weight"), ROWS, GREEDY),
    "head": ("bert", perturb("cls.seq_relationship.weight"), {"pair logits, single rows", "pair logits, padded batch"},
             set()),
    "missing tensor": ("llama3", without("model.layers.0.mlp.up_proj.weight"), ROWS | {"tensors"}, GREEDY),
    "ends": ("llama3", file("generation_config", eos_token_id=[1, 9]), {"end tokens"}, GREEDY),
    "decoder start": ("t5_1_1", file("generation_config", decoder_start_token_id=9), {"decoder start"}, GREEDY),
    "forced token": ("t5_1_1", file("generation_config", forced_bos_token_id=12), {"generation settings"}, GREEDY),
    "penalty": ("llama3", file("generation_config", repetition_penalty=3.0), {"generation settings"}, GREEDY),
    "missing key": ("llama3", file("config", rope_theta=None, rope_parameters=None), ROWS | {"config.json"}, GREEDY),
    "dtype": ("llama3", file("config", dtype="bfloat16"), {"dtype of config.json"}, set()),
    "padding": ("roberta", file("config", pad_token_id=0), ROWS | {"config.json"}, set()),
}  # fmt: skip


@pytest.mark.first(2)
@pytest.mark.parametrize("fault", few(FAULTS, ["vocabulary", "feed-forward", "head", "decoder start", "missing key"]))
def test_a_planted_fault_is_found(fault, imported, tmp_path):
    name, change, must, may = FAULTS[fault]
    directory, run = imported(name)
    shutil.copytree(directory, tmp_path / "changed")
    change(tmp_path / "changed")
    found = differing(verification.verify(str(tmp_path / "changed"), model=run))
    assert must <= found <= must | may


@pytest.mark.parametrize("name", few(["llama3", "bert", "t5_1_1", "roberta"], ["bert"]))
def test_a_directory_and_its_import_are_equal(name, imported):
    directory, run = imported(name)
    result = verification.verify(str(directory), model=run)
    assert not result.differs and not skipped(result), result.table()


def test_changed_merges_are_found(tmp_path):
    """GPT-2's tokenizer merges pairs of pieces in order; this test does not use the model."""
    shutil.copytree(new("gpt2"), tmp_path / "changed")
    ours = verified_tokenizer("gpt2")
    path = tmp_path / "changed" / "tokenizer.json"
    content = json.loads(path.read_text())
    merges = content["model"]["merges"]
    content["model"]["merges"] = [*merges[40:], *merges[:40]]
    path.write_text(json.dumps(content))
    found = tokens.compare_tokens(ours._replace(directory=str(tmp_path / "changed")))
    assert {comparison.what for comparison in found if comparison.status == "DIFFERS"} >= TEXTS | PAIRS


def verified_tokenizer(kind: str) -> Subject:
    """Returns a subject with a tokenizer of `NEW`, in a directory without weights."""
    directory = new(kind)
    tokenizer = read_tokenizer(directory)
    config = CASES[kind].config if kind in MADE else described_model(read_config_json(directory))[1]
    experiment = directories.evaluation_of(config, tokenizer.vocabulary, directory)
    return Subject(directory, None, Origin(directory, (), directory), experiment, tokenizer, False)


def test_changed_token_types_are_found():
    ours = verified_tokenizer("bert")
    frame = ours.tokenizer.vocabulary.frame
    assert frame and frame.pair
    frame = frame._replace(pair=frame.pair._replace(types=(0,) * 5))
    ours.tokenizer.vocabulary = dataclasses.replace(ours.tokenizer.vocabulary, frame=frame)
    found = tokens.compare_tokens(ours)
    assert {comparison.what for comparison in found if comparison.status == "DIFFERS"} == PAIRS


@pytest.mark.parametrize("kind", NEW)
def test_the_ids_of_each_kind_of_tokenizer_are_equal(kind):
    found = [*tokens.compare_tokens(verified_tokenizer(kind))]
    assert [c for c in found if c.status != "ok"] == []


def test_a_wrong_default_is_found(imported):
    """The file lacks a key, for which transformers' class has another default than our reader."""
    directory, _ = imported("llama3")
    config_json = json.loads((directory / "config.json").read_text())
    del config_json["rms_norm_eps"]
    theirs = settings.their_config(config_json)
    read = settings.comparable(described_model(config_json)[1])
    assert settings.field_differences(read, theirs) == []
    (line,) = settings.field_differences({**read, "norm_epsilon": 1e-3}, theirs)
    assert line == "config.model.norm_epsilon is 0.001, and 1e-06 in transformers' config class"


def test_wrong_generation_is_found(imported, monkeypatch):
    """The model is correct, but generation is not."""
    generate = outputs.generate_examples

    def shifted(*args):
        return [dataclasses.replace(text, ids=(*text.ids[:3], 5, *text.ids[4:])) for text in generate(*args)]

    monkeypatch.setattr(outputs, "generate_examples", shifted)
    directory, _ = imported("llama3")
    assert differing(verification.verify(str(directory))) == GREEDY


# --- no false alarm ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_tiny_models_of_all_architectures_are_equal(name, tmp_path):
    write_model(tmp_path / name, name)
    result = verification.verify(str(tmp_path / name))
    # AutoTokenizer reads every tokenizer of this model_type as Qwen2Tokenizer, which has its own pre-tokenizer.
    real = TEXTS | PAIRS | {"ids of special tokens spelled in texts"} if name.startswith("qwen2") else set()
    assert differing(result) == real, result.table()
    equal = {comparison.what for comparison in result.comparisons if comparison.status == "ok"}
    assert any(what.endswith(("single rows", "padded batch")) for what in equal), result.table()


HEADS = {
    "classes": ("bert", Classify(num_labels=3, kind="single")),
    "classes of a decoder": ("llama3", Classify(num_labels=3, kind="single")),
    "classes of BART": ("bart", Classify(num_labels=3, kind="single")),
    "several labels": ("roberta", Classify(num_labels=3, kind="multi")),
    "regression": ("modernbert", Classify(num_labels=1, kind="regression")),
    "choices": ("bert", Classify(num_labels=2, kind="choice")),
    "tags": ("electra_small", Tag(num_labels=3)),
    "tags of T5": ("t5_1_1", Tag(num_labels=3)),
    "spans": ("bert", Extract()),
    "spans of Longformer": ("longformer", Extract()),
    "spans of BigBird": ("bigbird_pairs", Extract()),
}


@pytest.mark.parametrize("kind", few(HEADS, ["classes", "choices"]))
def test_models_with_task_heads_are_equal(kind, tmp_path):
    name, head = HEADS[kind]
    case = with_head(name, head)
    assert case.family.huggingface is not None
    classifier = case.family.huggingface.classifier_of(head)
    assert classifier is not None
    write_model(tmp_path / "model", case._replace(config=classifier.apply_to(case.config)))
    result = verification.verify(str(tmp_path / "model"))
    assert not result.differs, result.table()
    equal = {comparison.what for comparison in result.comparisons if comparison.status == "ok"}
    assert equal >= {"tensors", f"{'span ' * isinstance(head, Extract)}logits, padded batch"}, result.table()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_hidden_states_of_an_exported_retriever_are_equal(name, tmp_path):
    write_retriever(tmp_path / "run", name, "mean")
    directories.export_workdir(str(tmp_path / "run"), str(tmp_path / "out"))
    result = verification.verify(str(tmp_path / "out"))
    assert not result.differs, result.table()
    equal = {comparison.what for comparison in result.comparisons if comparison.status == "ok"}
    assert equal >= {"hidden states, single rows", "hidden states, padded batch"}
    assert ("sentence-transformers" in skipped(result)) == (name == "bert")


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path):
    """Returns the folder of the base model, and writes an adapter of a kind of `ADAPTERS`."""

    def write_adapter(key):
        import peft

        name, task, config_of = ADAPTERS[key]
        write_model(tmp_path / "base", name)
        model = noisy(peft.get_peft_model(base_model(str(tmp_path / "base"), task), config_of(task)))
        model.save_pretrained(str(tmp_path / "adapter"))
        return str(tmp_path / "adapter")

    return write_adapter


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed (extra parity)")
@pytest.mark.parametrize(
    "key",
    few(
        ["bert classes", "roberta tags, dora", "llama text", "t5 text", "ia3 of llama", "prefix of llama",
         "prompt of gpt2", "prompt of t5", "bert spans"],
        ["bert classes"],
    ),
)  # fmt: skip
def test_an_adapter_is_equal_until_it_is_changed(key, adapter, tmp_path):
    directory = adapter(key)
    import_adapter(directory, None, str(tmp_path / "run"))
    result = verification.verify(directory, model=str(tmp_path / "run"))
    rows = {comparison.what for comparison in result.comparisons if comparison.what.endswith("single rows")}
    assert not result.differs and rows, result.table()
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    name = next(name for name, x in arrays.items() if x.size > 16)
    arrays[name] = arrays[name] + np.random.RandomState(0).standard_normal(arrays[name].shape).astype(np.float32)
    safetensors.numpy.save_file(arrays, path, {"format": "pt"})
    assert differing(verification.verify(directory, model=str(tmp_path / "run"))) >= rows


# --- models and files that are not compared ---------------------------------------------------------------------------


def test_a_model_that_needs_more_memory_is_not_computed(imported, monkeypatch):
    directory, _ = imported("llama3")
    monkeypatch.setattr(outputs, "available_memory", lambda: 10_000)
    result = verification.verify(str(directory))
    assert not result.differs
    assert skipped(result) == {
        "outputs and greedy tokens": "the float32 parameters need 75.14 kB, and this machine has 10.00 kB available: "
        "--nocheck_memory compares anyway"
    }
    monkeypatch.setattr(outputs, "compare_outputs", lambda subject: iter(()))
    monkeypatch.setattr(verification, "compare_outputs", lambda subject: iter(()))
    assert not skipped(verification.verify(str(directory), check_memory=False))


def test_a_class_that_transformers_lacks_is_named(imported, tmp_path):
    directory, _ = imported("llama3")
    shutil.copytree(directory, tmp_path / "model")
    changed(tmp_path / "model" / "config.json", architectures=["LlamaForMachines"])
    result = verification.verify(str(tmp_path / "model"))
    assert skipped(result) == {"outputs": "transformers has no class LlamaForMachines"} and not result.differs


def test_a_missing_transformers_is_one_line_with_the_extra(imported, monkeypatch):
    monkeypatch.setattr(verification, "versions", lambda: None)
    with pytest.raises(UserError, match=r"pip install 'pretrainax\[parity\]'"):
        pretrainax.verify("anything")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"directory": "nowhere"}, "nowhere is no directory here"),
        ({"directory": "RUN"}, "is a run: give the Hugging Face directory of an export"),
        ({"directory": "DIR", "base": "x"}, "--base=x is for adapters"),
        ({"directory": "DIR", "model": "nowhere"}, "nowhere is no directory here"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, imported):
    directory, run = imported("llama3")
    with pytest.raises(UserError, match=message):
        pretrainax.verify(
            **{name: {"DIR": directory, "RUN": pathlib.Path(run)}.get(x, x) for name, x in arguments.items()}
        )


def test_a_number_that_is_not_finite_differs():
    assert within("logits", "1 row", float("nan"), 1.0, "", []).status == "DIFFERS"
