"""Measures data throughput on one core: objectives and complete pipelines, in alternating rounds with peers.

`python benchmarks/data.py` reads the embedded corpus; `--text='books/*.jsonl.gz'` selects other documents. The peers
are transformers' collator, torch's DataLoader over Hugging Face datasets, nanoGPT's memmap loader, and the published
algorithm of span corruption in plain NumPy. Values are corpus tokens per second, as medians of alternating rounds, in
one process. A pipeline includes Grain's prefetching thread, on the same core.

`--store=gs://bucket/cache` measures only the wait for data, in four cases:

- the corpus on disk
- the corpus in an object store, with all shards saved locally
- the corpus in an object store, without local shards
- the same with one request per row, as in a corpus so large that no two rows of a step are near each other

`python -m tests.support.fake_gcs` serves a store on this machine; `--delay` simulates a distant store.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from pretrainax.config import DataConfig, Experiment, ModelConfig
from pretrainax.data.collate import collate
from pretrainax.data.objectives import CausalLM, MaskedLM, ObjectiveInput, SpanCorruption
from pretrainax.data.packing import BestFit
from pretrainax.data.pipeline import Batches, iterate
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.rng import CounterRng
from pretrainax.data.row_stream import RowOptions
from pretrainax.data.shard_cache import ShardCache
from pretrainax.data.sources import JsonLines, PythonDocs
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.runtime.host import tune_malloc
from pretrainax.storage import store as stores
from pretrainax.tokenization import ByteBPE, Unigram

ROWS = 32
BERT_BATCH = 256
BERT_BASE_ON_H200 = 940_000  # tokens/s of BERT-base at 512 with the head on masked tokens, at 60 % of 990 TFLOP/s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", help="JSON lines that replace the embedded corpus")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per measurement")
    parser.add_argument("--store", help="URL of a cache in an object store")
    options = parser.parse_args()
    tune_malloc()  # like a run
    source = JsonLines(path=options.text) if options.text else PythonDocs()
    if options.store:
        return beside_the_disk(source, options.store)
    bpe = prepared(source, ByteBPE(vocab_size=8192, special_pieces="roberta"), MaskedLM())
    unigram = prepared(source, Unigram(vocab_size=8000), SpanCorruption())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    causal = dict(corpus=bpe, objective=CausalLM(), sequence_length=1024)
    masked = dict(corpus=bpe, objective=MaskedLM(), sequence_length=512)
    spans = dict(corpus=unigram, objective=SpanCorruption(), sequence_length=512)
    print("| work | tokens/s | peer | tokens/s, peer | ratio (range) |\n| --- | --- | --- | --- | --- |")
    row = lambda *columns: compare(*columns, options.rounds, options.seconds)  # noqa: E731
    row("masked LM, 512, ids to collated batch", examples(**masked), "transformers' collator", collator(bpe))
    row("span corruption, 568 to 512 + 114", examples(**spans), "published algorithm in NumPy", sketch(unigram))
    row("pipeline, causal, 1,024", pipeline(**causal), "nanoGPT's memmap loader", memmap(bpe))
    row("pipeline, masked, 512", pipeline(**masked), "datasets + collator + DataLoader", data_loader(bpe))
    row("pipeline, spans, 568", pipeline(**spans), "none", None)
    row("pipeline, causal, best fit, 1,024", pipeline(**causal, packing=BestFit()), "none", None)
    for name, work in (("causal", causal), ("masked", masked), ("spans", spans)):
        print(f"first batch at step 1,000,000, {name}: {first_batch_seconds(work):.2f} s")
    print(f"wait for data with steps of BERT-base at {BERT_BASE_ON_H200:,} tokens/s: {wait_fraction(masked):.3%}")
    for length in (512, 1024, 2048):
        packed = batches(bpe, CausalLM(), length, packing=BestFit())
        print(f"best fit, {length:,}: {packed.statistics()['fill']:.2%} of the tokens of a row are text")


def beside_the_disk(source: Any, store: str) -> None:
    """Prints the share of time that a loop waits for data, with the corpus on disk and in a store."""
    tokenizer = ByteBPE(vocab_size=8192, special_pieces="roberta")
    on_disk = prepared(source, tokenizer, MaskedLM())
    in_store = prepared(source, tokenizer, MaskedLM(), store)
    kept = ShardCache(in_store.train, 10**12)
    for path in in_store.train[0].shard_sizes():
        kept.fetch(path)
    masked = dict(objective=MaskedLM(), sequence_length=512)
    print(f"wait for data with steps of BERT-base at {BERT_BASE_ON_H200:,} tokens/s")
    print(f"on disk: {wait_fraction(masked | dict(corpus=on_disk)):.3%}")
    print(f"in a store, all shards local: {wait_fraction(masked | dict(corpus=in_store)):.3%}")
    ShardCache(in_store.train, 0)
    in_store = prepared(source, tokenizer, MaskedLM(), store)
    print(f"in a store, no local shards: {wait_fraction(masked | dict(corpus=in_store)):.3%}", flush=True)
    with mock.patch.object(stores, "NEAR", -1):
        print(f"in a store, no local shards, one request per row: {wait_fraction(masked | dict(corpus=in_store)):.3%}")


def prepared(source: Any, tokenizer: Any, objective: Any, cache: str = DataConfig.cache_dir) -> Any:
    family = objective.families[0]
    return prepare(
        Experiment(
            ModelConfig(family=family, vocab_size=10_000),
            tokenizer,
            DataConfig(source=source, cache_dir=cache),
            objective,
            AdamW(1e-3),
            WarmupCosine(),
        )
    )


def batches(corpus: Any, objective: Any, sequence_length: int, packing: Any = None, rows: int = ROWS) -> Batches:
    return Batches(
        corpus.train,
        objective.bind(corpus.tokenizer),
        corpus.tokenizer.vocabulary,
        RowOptions(sequence_length, global_batch_size=rows, seed=0, packing=packing),
        steps=10**6,
    )


# --- ours: each returns a function that makes one batch and returns the number of corpus tokens in it


def examples(corpus, objective, sequence_length) -> Callable[[], int]:
    vocabulary, lengths = corpus.tokenizer.vocabulary, objective.lengths(sequence_length)
    windows = [corpus.train[0].window(i * lengths.raw, lengths.raw) for i in range(ROWS)]
    draws, objective, state = CounterRng(0), objective.bind(corpus.tokenizer), [0]

    def make() -> int:
        rows = []
        for i, window in enumerate(windows):
            rows.append([objective.example(ObjectiveInput(*window), draws.at(0, state[0] + i), vocabulary)])
        state[0] += ROWS
        collate(rows, lengths, 0)
        return ROWS * lengths.raw

    return make


def pipeline(corpus, objective, sequence_length, packing=None) -> Callable[[], int]:
    made = batches(corpus, objective, sequence_length, packing)
    stream = iterate(made, 0, 10**9)

    def make() -> int:
        next(stream)
        return ROWS * made.lengths.raw

    return make


# --- peers


def collator(corpus) -> Callable[[], int]:
    import torch
    from transformers import DataCollatorForLanguageModeling

    torch.set_num_threads(1)
    collate = DataCollatorForLanguageModeling(hugging_face(corpus.tokenizer), mlm_probability=0.15)
    rows = [torch.from_numpy(corpus.train[0].tokens(i * 512, 512).astype(np.int64)) for i in range(ROWS)]

    def make() -> int:
        collate([{"input_ids": row} for row in rows])
        return ROWS * 512

    return make


def data_loader(corpus) -> Callable[[], int]:
    import datasets
    import torch
    from transformers import DataCollatorForLanguageModeling

    count = min(corpus.train[0].num_tokens // 512, 20_000)
    rows = corpus.train[0].tokens(0, count * 512).reshape(count, 512)
    dataset = datasets.Dataset.from_dict({"input_ids": rows}).with_format("torch")
    collate = DataCollatorForLanguageModeling(hugging_face(corpus.tokenizer), mlm_probability=0.15)

    def forever() -> Iterator[dict]:
        while True:
            yield from torch.utils.data.DataLoader(dataset, ROWS, shuffle=True, collate_fn=collate, drop_last=True)

    stream = forever()

    def make() -> int:
        next(stream)
        return ROWS * 512

    return make


def hugging_face(tokenizer) -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    fast = tokenizers.Tokenizer.from_str(tokenizer.model.decode())
    return PreTrainedTokenizerFast(tokenizer_object=fast, mask_token="<mask>", pad_token="<pad>")


def memmap(corpus) -> Callable[[], int]:
    """Reads rows at random offsets of a uint16 file, and the targets one token later, as int64 tensors."""
    import tempfile

    import torch

    train = corpus.train[0]
    with tempfile.NamedTemporaryFile(suffix=".bin", delete=False) as f:
        train.tokens(0, min(train.num_tokens, 1 << 26)).astype(np.uint16).tofile(f)

    def make() -> int:
        data = np.memmap(f.name, np.uint16, mode="r")
        places = torch.randint(len(data) - 1024, (ROWS,))
        torch.stack([torch.from_numpy(data[i : i + 1024].astype(np.int64)) for i in places])
        torch.stack([torch.from_numpy(data[i + 1 : i + 1025].astype(np.int64)) for i in places])
        return ROWS * 1024

    return make


def sketch(corpus) -> Callable[[], int]:
    """Span corruption, step by step like the code of the paper, with one generator for all rows."""
    rng, vocabulary = np.random.default_rng(0), corpus.tokenizer.vocabulary
    windows = [corpus.train[0].tokens(i * 568, 568) for i in range(ROWS)]
    num_noise, num_spans = 85, 28
    first_sentinel = max(vocabulary.sentinels)

    def segments(items: int, parts: int) -> np.ndarray:
        starts = np.zeros(items, np.int32)
        starts[1:][rng.permutation(items - 1) < parts - 1] = 1
        return np.bincount(np.cumsum(starts), minlength=parts)

    def replaced(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
        before = np.concatenate([[False], mask[:-1]])
        first = mask & ~before
        sentinels = first_sentinel + 1 - np.cumsum(first)
        return np.where(first, sentinels, tokens)[~(mask & before)]

    def make() -> int:
        inputs, targets = np.zeros((ROWS, 512), np.int32), np.zeros((ROWS, 114), np.int32)
        for i, tokens in enumerate(windows):
            noise, text = segments(num_noise, num_spans), segments(568 - num_noise, num_spans)
            ends = np.cumsum(np.stack([text, noise], 1).ravel())
            marks = np.zeros(568, np.int32)
            marks[ends[:-1]] = 1
            mask = np.cumsum(marks) % 2 == 1
            inputs[i] = np.append(replaced(tokens, mask), vocabulary.eos)
            targets[i] = np.append(replaced(tokens, ~mask), vocabulary.eos)
        return ROWS * 568

    return make


# --- measuring


def rate(make: Callable[[], int], seconds: float) -> float:
    tokens, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        tokens += make()
    return tokens / taken


def compare(name: str, ours: Callable, peer_name: str, peer: Any, rounds: int, seconds: float) -> None:
    mine, its = [], []
    for make in filter(None, (ours, peer)):
        make()
    for _ in range(rounds):
        mine.append(rate(ours, seconds))
        if peer:
            its.append(rate(peer, seconds))
    columns = [name, f"{statistics.median(mine) / 1e6:.1f} M", peer_name]
    if peer:
        ratios = sorted(a / b for a, b in zip(mine, its, strict=True))
        columns.append(f"{statistics.median(its) / 1e6:.1f} M")
        columns.append(f"{statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})")
    print(f"| {' | '.join(columns + [''] * (5 - len(columns)))} |", flush=True)


def first_batch_seconds(work: dict) -> float:
    start = time.perf_counter()
    next(iterate(batches(**work), 1_000_000, 1_000_010))
    return time.perf_counter() - start


def wait_fraction(work: dict) -> float:
    """Returns the share of time that a loop waits for data.

    Its steps take as long as steps of BERT-base on an H200 and do not use the CPU.
    """
    stream = iterate(batches(**work, rows=BERT_BATCH), 0, 10**6)
    step, waited, steps = BERT_BATCH * 512 / BERT_BASE_ON_H200, 0.0, 60
    next(stream)
    for _ in range(steps):
        start = time.perf_counter()
        next(stream)
        waited += time.perf_counter() - start
        time.sleep(step)
    return waited / (steps * step + waited)


if __name__ == "__main__":
    main()
