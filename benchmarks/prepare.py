"""Measures the speed of corpus preparation, compared with the tokenizer library alone, and memory for a long document.

`python benchmarks/prepare.py` writes documents to JSON lines and prepares them with all cores. The documents come from
Python's documentation, or with --text=FILE from a .jsonl, .jsonl.gz or .txt file. The peer is the library's batch call
with the same number of threads on the same documents in memory, in alternating rounds. Then the script prepares a
document of 200 MB in one JSON line and in one text file, and prints the peak memory of all processes together.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import sentencepiece
import tokenizers

from pretrainax.config import DataConfig, Experiment, ModelConfig
from pretrainax.data.objectives import CausalLM, MaskedLM
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import JsonLines, PythonDocs, TextFiles
from pretrainax.tokenization import ByteBPE, Unigram, WordPiece
from pretrainax.tokenization.choices import TokenizerConfig

CORES = len(os.sched_getaffinity(0))
FILES = 4 * CORES
CONFIG = """
from pretrainax.config import DataConfig, Experiment, ModelConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import JsonLines, TextFiles
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import ByteBPE

def get_config(variant=""):
    data = DataConfig({source}, cache_dir={cache!r})
    model, tokenizer = ModelConfig(vocab_size=8192), ByteBPE(vocab_size=8192)
    return Experiment(model, tokenizer, data, CausalLM(), AdamW(), WarmupCosine(5))
"""


def documents_of(path: str | None) -> Iterator[str]:
    if path is None:
        source = PythonDocs()
    else:
        source = TextFiles(path, valid_path=path) if path.endswith(".txt") else JsonLines(path, valid_path=path)
    for shard in source.shards("train"):
        yield from source.read(shard, collections.Counter())


def repeated(documents: list[str], size: int) -> list[str]:
    """Repeats the documents up to `size` bytes."""
    chosen, total = [], 0
    while total < size:
        for document in documents:
            chosen.append(document)
            total += len(document.encode())
            if total >= size:
                break
    return chosen


# --- speed ---------------------------------------------------------------------------------------------------------


def library_seconds(directory: str, documents: list[str]) -> float:
    """Times the library's batch call with one thread per core, in batches of a thousand documents."""
    batches = [documents[i : i + 1000] for i in range(0, len(documents), 1000)]
    if os.path.exists(os.path.join(directory, "spiece.model")):
        processor = sentencepiece.SentencePieceProcessor(model_file=os.path.join(directory, "spiece.model"))
        started = time.perf_counter()
        for batch in batches:
            processor.encode(batch, num_threads=CORES)
    else:
        tokenizer = tokenizers.Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))
        started = time.perf_counter()
        for batch in batches:
            tokenizer.encode_batch(batch, add_special_tokens=False)
    return time.perf_counter() - started


def prepare_seconds(tokenizer: TokenizerConfig, folder: str) -> float:
    """Times the preparation from JSON lines to an index, process start included."""
    with tempfile.TemporaryDirectory() as cache:
        started = time.perf_counter()
        prepare(experiment(tokenizer, folder, cache), report=lambda line: None)
        return time.perf_counter() - started


def experiment(tokenizer: TokenizerConfig, folder: str, cache: str) -> Experiment:
    data = DataConfig(JsonLines(folder, valid_fraction=0.01), cache_dir=cache)
    objective = MaskedLM() if isinstance(tokenizer, WordPiece) else CausalLM()
    return Experiment(ModelConfig(vocab_size=65_536), tokenizer, data, objective, None, None)


def speed(text: str | None, megabytes: int, rounds: int) -> None:
    given = list(documents_of(text))
    # SentencePiece is several times as fast, so it gets more text. Otherwise process start would dominate the time.
    for kind, times in ((WordPiece, 1), (ByteBPE, 1), (Unigram, 6)):
        documents = repeated(given, times * megabytes * 10**6)
        size = sum(len(document.encode()) for document in documents) / 1e6
        with tempfile.TemporaryDirectory() as folder:
            for i in range(FILES):
                with open(os.path.join(folder, f"{i}.jsonl"), "w") as f:
                    f.writelines(json.dumps({"text": document}) + "\n" for document in documents[i::FILES])
            saved = os.path.join(folder, kind.__name__)
            kind(vocab_size=16_000).build(repeated(documents, 10**7)).save(saved)
            taken = collections.defaultdict(list)
            for _ in range(rounds):
                taken["library"].append(library_seconds(saved, documents))
                taken["prepare"].append(prepare_seconds(kind(path=saved), folder))
        ratios = sorted(a / b for a, b in zip(taken["library"], taken["prepare"], strict=True))
        rates = {name: size / statistics.median(seconds) for name, seconds in taken.items()}
        print(
            f"{kind.__name__}, {size:,.0f} MB, {CORES} cores: prepare {rates['prepare']:.1f} MB/s, library "
            f"{rates['library']:.1f} MB/s, ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


# --- memory --------------------------------------------------------------------------------------------------------


def peak_megabytes(source: str, folder: str) -> float:
    """Returns the peak memory of `pretrainax.prepare` and its children; counts shared pages in each process."""
    config = os.path.join(folder, "config.py")
    with open(config, "w") as f:
        f.write(CONFIG.format(source=source, cache=os.path.join(folder, f"cache-{time.monotonic_ns()}")))
    process = subprocess.Popen([sys.executable, "-m", "pretrainax.prepare", f"--config={config}"])
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident_bytes(process.pid))
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak / 1e6


def resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as f:
            pages = int(f.read().split()[1])
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            children = f.read().split()
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in children)


def memory(text: str | None, megabytes: int) -> None:
    documents = list(documents_of(text))
    lines = "\n".join(repeated(documents, megabytes * 10**6)).encode()[: megabytes * 10**6].decode(errors="ignore")
    cases = {
        "one JSON line": ("jsonl", json.dumps({"text": lines}, ensure_ascii=False)),
        "one JSON line with escapes, one emoji": ("jsonl", json.dumps({"text": f"\U0001f600{lines}"})),
        "one text file": ("txt", lines),
        "one text file without line ends": ("txt", lines.replace("\n", " ")),
    }
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, (ending, content)) in enumerate(cases.items()):
            path = os.path.join(folder, f"{i}.{ending}")
            with open(path, "w") as f:
                f.write(content)
                if ending == "jsonl":
                    f.writelines("\n" + json.dumps({"text": f"{j} {document}"}) for j, document in enumerate(documents))
            kind = "JsonLines" if ending == "jsonl" else "TextFiles"
            peak = peak_megabytes(f"{kind}({path!r}, valid_fraction=0.05)", folder)
            print(f"{name} of {megabytes} MB: at most {peak:,.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", help="file with the documents")
    parser.add_argument("--megabytes", type=int, default=100, help="MB of text to prepare")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--document-megabytes", type=int, default=200)
    options = parser.parse_args()
    speed(options.text, options.megabytes, options.rounds)
    memory(options.text, options.document_megabytes)


if __name__ == "__main__":
    main()
