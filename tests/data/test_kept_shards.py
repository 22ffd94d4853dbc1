"""A corpus in a store gives the batches that it gives on a disk, however little of it this machine keeps."""

import json
import os
import pathlib
import random

import chex
import pytest

from pretrainax.config import DataConfig, Experiment, ModelConfig, TrainConfig
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.kept_shards import KeptShards
from pretrainax.data.objectives import CausalLM, NextSentencePrediction
from pretrainax.data.pipeline import batches_of
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.storage import places
from pretrainax.storage.store import Store
from pretrainax.tokenization import ByteBPE, WordPiece

STEPS = 6


@pytest.fixture
def lines(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioustrnlkm", k=rng.randint(2, 7))) for _ in range(200)]
    (tmp_path / "lines").mkdir()
    for i in range(8):
        texts = [" ".join(rng.choices(words, k=30)).capitalize() + ". " + "Then it ends." for _ in range(10)]
        (tmp_path / "lines" / f"{i}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return tmp_path / "lines"


@pytest.fixture
def another_machine(tmp_path, monkeypatch):
    """Has this one forget what it has of any store."""

    def forget():
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{random.random()}"))
        monkeypatch.setattr(places, "_twins", {})

    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'pretrainax[test]'")
    forget()
    return forget


def experiment(lines, cache, kind):
    sentences = kind == "sentences"
    model = ModelConfig(family="encoder" if sentences else "decoder", vocab_size=512, num_token_types=2)
    tokenizer = WordPiece(vocab_size=200) if sentences else ByteBPE(vocab_size=280)
    data = DataConfig(JsonLines(str(lines), valid_fraction=0.2), 32, cache_dir=str(cache), prepare_workers=1)
    objective = NextSentencePrediction() if sentences else CausalLM()
    train = TrainConfig(steps=STEPS, global_batch_size=4)
    return Experiment(model, tokenizer, data, objective, AdamW(1e-3), WarmupCosine(), train=train)


def made(prepared, of, split="train"):
    batches = batches_of(of, prepared, split)
    return [batches[step] for step in range(STEPS)]


def tokens_here(prepared):
    return sorted(path for c in prepared.train for path in map(str, pathlib.Path(c.directory).glob("*.tokens")))


@pytest.mark.parametrize("kind", ["windows", "sentences"])
def test_batches_are_the_same_with_any_number_of_shards_on_this_machine(lines, tmp_path, kind, another_machine):
    on_disk = experiment(lines, tmp_path / "disk", kind)
    expected = made(prepare(on_disk, print), on_disk)
    of = experiment(lines, f"memory://bucket/{random.random()}", kind)
    chex.assert_trees_all_equal(made(prepare(of, print), of), expected)
    another_machine()
    prepared = prepare(of, print)
    assert prepared.summary.split("; ")[-1].startswith("from ") and not tokens_here(prepared)
    chex.assert_trees_all_equal(made(prepared, of), expected)
    sizes = prepared.train[0].shard_sizes()
    for count in (1, len(sizes)):
        limit = sum(list(sizes.values())[:count])
        with CorpusCheck(prepared.train, bring=KeptShards(prepared.train, limit).bring) as check:
            check.wait()
        assert len(tokens_here(prepared)) == count and check.elsewhere == len(sizes) - count
        chex.assert_trees_all_equal(made(prepare(of, print), of), expected)


def test_the_text_of_a_batch_is_asked_for_at_once(lines, another_machine, monkeypatch):
    of = experiment(lines, f"memory://bucket/{random.random()}", "windows")
    prepare(of, print)
    another_machine()
    batches = batches_of(of, prepare(of, print), "train")
    _ = batches[0]  # and what it asks for to know which arrays batches have
    asked, original = [], Store.read_ranges
    monkeypatch.setattr(Store, "read_ranges", lambda s, ranges: (asked.append(len(ranges)), original(s, ranges))[1])
    _ = batches[1]
    assert len(asked) == 1 and asked[0] >= 4  # a window may lie in two shards


def test_room_is_made_where_nobody_has_looked_for_longest(lines, another_machine):
    of = experiment(lines, f"memory://bucket/{random.random()}", "windows")
    first = prepare(of, print)
    of.tokenizer = ByteBPE(vocab_size=290)
    second = prepare(of, print)
    for age, path in enumerate(tokens_here(first)):
        os.utime(path, ns=(1000 + age, os.stat(path).st_mtime_ns))
    own, last = second.train[0].shard_sizes(), tokens_here(first)[-1]
    valid_of_both = sum(sum(c.shard_sizes().values()) for p in (first, second) for c in p.valid)
    KeptShards(second.train, sum(own.values()) + valid_of_both + os.path.getsize(last))
    assert tokens_here(second) == sorted(own) and tokens_here(first) == [last]
    KeptShards(second.train, 0)
    assert not tokens_here(second) and not tokens_here(first)
    chex.assert_trees_all_equal(made(prepare(of, print), of), made(second, of))
