"""Every config of the repository loads, is valid, and trains two steps at a small size."""

import dataclasses
import glob
import json
import os
import pathlib
import re
import runpy

import pytest

from pretrainax import config as config_lib
from pretrainax import zoo
from pretrainax.config import (
    DecoderSizes,
    Experiment,
    LongContextScaling,
    RandomBlocks,
    Recurrent,
    UserError,
    phases_of,
)
from pretrainax.config.config_file import find_config, read_config_file
from pretrainax.config.validation import validate
from pretrainax.data.sources import JsonLines, TextFiles
from pretrainax.runs.train import train
from pretrainax.tokenization import Words
from tests.support.tiers import few

ROOT = pathlib.Path(__file__).parents[1]
# Configs without published sizes, or with sizes that no row of the zoo has.
VARIANTS: dict[str, list[str]] = {
    "finetune": [
        *"cola sst2 mrpc stsb qqp mnli qnli rte wnli conll2000 conll2003".split(),
        *"squad squad_v2 race race_middle race_high swag boolq cb copa multirc superglue_rte wic wsc".split(),
        *"xsum cnn_dailymail samsum alpaca dolly natural_questions msmarco".split(),
        *("answers", "choice", "token_classification", "text_to_text", "instructions", "retrieval"),
        *("regression", "classification"),
    ],
    "quickstart": [""],
    "shakespeare_char": [""],
    "t5_base": ["nano"],
    "ul2_base": ["base"],
}
for config in dict.fromkeys(config for family in zoo.FAMILIES for config in family.configs.values()):
    file, _, variant = config.partition(":")
    VARIANTS.setdefault(pathlib.Path(file).stem, []).append(variant)
NAMES = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]


def load(name: str, variant: str) -> Experiment:
    return runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"](variant)


# The configs that `make test` trains: one of each kind.
QUICK = (
    "t5_base",
    "bert_base",
    "llama",
)


def test_no_config_is_forgotten_here():
    assert sorted(VARIANTS) == sorted(os.path.basename(f)[:-3] for f in glob.glob(str(ROOT / "configs" / "*.py")))


@pytest.mark.parametrize("name, variant", NAMES)
def test_a_config_is_sound_and_survives_json(name, variant):
    experiment = load(name, variant)
    if name in ("shakespeare_char", "transformer"):
        experiment.data.source.path = __file__  # these configs train on the user's text
    if name == "finetune":
        experiment.data.source = JsonLines(path=__file__)
        if not getattr(experiment.objective, "labels", True):
            experiment.objective.labels = ("O", "B-X", "I-X")  # from the records, which this file does not have
    experiment.objective.complete(experiment)
    validate(experiment)
    assert config_lib.from_json(Experiment, json.loads(config_lib.dump(experiment))) == experiment


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("quickstart", "shakespeare_char")])
def test_an_unknown_variant_names_the_nearest(name):
    with pytest.raises(UserError, match="did you mean"):
        load(name, VARIANTS[name][0] + "x")


@pytest.mark.parametrize("name", ["quickstart", "shakespeare_char"])
def test_a_config_of_one_size_has_no_variant(name):
    with pytest.raises(UserError, match=f"{name} has no variant 'x'"):
        load(name, "x")


def test_the_path_of_a_config_may_contain_colons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a:b/mine.py", "a:b/c:d.py"):
        pathlib.Path(path).parent.mkdir(exist_ok=True)
        pathlib.Path(path).write_text("")
        assert find_config(path) == (path, "") and find_config(f"{path}:large") == (path, "large")
        assert find_config(f"{path}:of/1:2") == (path, "of/1:2")
    assert find_config("bert_base:a:b") == (str(ROOT / "pretrainax" / "configs" / "bert_base.py"), "a:b")
    for path in ("a:b", "C:/mine.py", "C:\\mine.py", "a:b/c.py"):
        with pytest.raises(UserError, match=re.escape(repr(path)) if ".py" in path else "--config=a:b is a folder"):
            read_config_file(path)


def pairs_of(text: str) -> JsonLines:
    """Writes pairs of each line of a folder's files and the line with its words in reverse order."""
    path = pathlib.Path(text, "pairs.jsonl")
    lines = [line for file in sorted(path.parent.glob("*.txt")) for line in file.read_text().splitlines()]
    records = ({"source": line, "target": " ".join(line.split()[::-1])} for line in lines)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return JsonLines(path=str(path), text_field="source", target_field="target", valid_fraction=0.1)


def records_of(text: str) -> JsonLines:
    """Writes a record for each line of a folder's files; the label is "1" if the first word is short."""
    path = pathlib.Path(text, "records.jsonl")
    lines = [line for file in sorted(path.parent.glob("*.txt")) for line in file.read_text().splitlines()]
    records = ({"text": line, "label": int(len(line.split()[0]) < 5)} for line in lines)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return JsonLines(path=str(path), valid_fraction=0.1)


def shrink(experiment: Experiment, text: str, cache: str) -> None:
    """Reduces the sizes of a config, and keeps its features."""
    model = experiment.model
    model.num_layers, model.d_model, model.d_ff, model.num_heads, model.vocab_size = 2, 32, 64, 4, 640
    model.embedding_dim = model.embedding_dim and 16
    model.num_decoder_layers = model.num_decoder_layers and 2
    model.decoder = model.decoder and DecoderSizes(d_model=16, d_ff=48, num_heads=2, num_kv_heads=1, head_dim=4)
    if model.generator is not None:
        model.generator = dataclasses.replace(model.generator, num_layers=2, d_model=16, d_ff=32, num_heads=2)
    if model.experts is not None:
        sizes = {"num_experts": 4, "top_k": min(model.experts.top_k, 2), "d_ff": model.experts.d_ff and 16}
        fewer = {"groups": 2, "top_groups": 1, "first_dense": 1, "every": 2, "dense_after": 48}
        sizes |= {name: size for name, size in fewer.items() if getattr(model.experts, name)}
        model.experts = dataclasses.replace(model.experts, **sizes)
    if model.latent_attention is not None:
        sizes = {"rank": 8, "query_rank": model.latent_attention.query_rank and 8, "rotary_dim": 4, "value_dim": 6}
        model.latent_attention = dataclasses.replace(model.latent_attention, **sizes)
        model.num_kv_heads = None
    if isinstance(model.sparse_attention, RandomBlocks):
        model.sparse_attention = dataclasses.replace(model.sparse_attention, size=2)
    if recurrent := model.part(Recurrent):
        model.parts = (dataclasses.replace(recurrent, character_dim=4, filters=(8, 16)),)
    model.num_kv_heads = model.num_kv_heads and min(model.num_kv_heads, 2)
    model.head_dim = model.head_dim and 8
    model.layer_pattern = tuple(dict.fromkeys(model.layer_pattern))  # one layer of each kind
    model.window = model.window and 8
    experiment.tokenizer.path = None
    if hasattr(experiment.tokenizer, "vocab_size"):
        # There are more characters and character pairs than words.
        experiment.tokenizer.vocab_size = 100 if isinstance(experiment.tokenizer, Words) else 400
    experiment.data.workers, experiment.data.prepare_workers = 0, 1
    experiment.data.sequence_length = 32 if experiment.objective.packs else 128  # a pair of sentences is longer
    experiment.data.source = pairs_of(text) if experiment.data.source.pairs else TextFiles(path=text)
    if experiment.objective.unit == "records":
        experiment.data.source = records_of(text)
    experiment.data.cache_dir = cache
    experiment.train.steps, experiment.train.global_batch_size, experiment.train.log_every = 2, 8, 1
    if experiment.phases:  # one step for each phase
        experiment.train.steps, room = len(experiment.phases), experiment.data.sequence_length
        sizes = {"sequence_length": lambda n: min(n, 2 * room), "global_batch_size": lambda n: 16}
        short = [{k: f(getattr(p, k)) for k, f in sizes.items() if getattr(p, k)} for p in experiment.phases]
        experiment.phases = tuple(map(lambda p, s: dataclasses.replace(p, **s), experiment.phases, short))
    experiment.schedule.warmup_steps = 1
    experiment.evaluate.every, experiment.evaluate.batches = 2, 1


@pytest.mark.first(1)
@pytest.mark.parametrize("name", few(VARIANTS, QUICK))
def test_a_config_trains_two_steps_or_one_of_each_phase(name, tmp_path, text, cache):
    experiment = load(name, VARIANTS[name][-1])
    shrink(experiment, str(text), str(cache))
    assert train(experiment, str(tmp_path / "run")) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validated = range(1, experiment.train.steps + 1) if experiment.phases else [2]
    expected = [(n, split) for n in range(1, experiment.train.steps + 1) for split in ("train", "valid")]
    assert [(line["step"], line["split"]) for line in lines] == [
        (n, split) for n, split in expected if split == "train" or n in validated
    ]


def test_the_phases_of_a_recipe_are_those_of_its_paper():
    found = {}
    for name, variant in (("bert_base", "base"), ("bart_base", "base"), ("modernbert_base", "base")):
        found[name] = [(phase.stop, phase.changes) for phase in phases_of(load(name, variant))]
    assert found["bert_base"] == [(900_000, "sequence_length 128"), (1_000_000, "")]
    assert found["bart_base"] == [(450_000, ""), (500_000, "dropout_rate 0.0, attention_dropout_rate 0.0")]
    long_rows = "sequence_length 8192, global_batch_size 576, learning_rate 0.0003, theta 160000.0"
    assert found["modernbert_base"] == [(364_304, ""), (417_286, long_rows), (427_882, long_rows)]
    ramp = [(phase.stop, phase.changes) for phase in phases_of(load("llama", "3_1_405b"))]  # 252 M, 2.87 T, 15.6 T
    assert ramp == [
        (60, "sequence_length 4096, global_batch_size 1024"),
        (342_161, "sequence_length 8192, global_batch_size 1024"),
        (1_100_928, ""),
    ]
    assert load("llama", "2_7b").phases == ()
    large = load("modernbert_base", "large")
    assert [phase.learning_rate for phase in large.phases] == [None, 5e-5, 5e-5, 5e-5]
    for variant in ("tiny", "mini", "midi"):
        for name in ("bert_base", "modernbert_base", "llama"):
            assert load(name, variant).phases == ()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_curves_of_a_config_have_fifty_points(name):
    train = load(name, VARIANTS[name][0]).train
    assert train.steps // train.logged_every >= 50


def test_llama_3_1_scales_its_rotary_frequencies():
    assert load("llama", "3_1_8b").model.position.scaling == LongContextScaling()
