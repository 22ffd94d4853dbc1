"""Tests that `prepare` makes the same corpus with any number of kills and of processes, and explains failures."""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import pretrainax
from pretrainax.config import DataConfig, Experiment, ModelConfig, UserError
from pretrainax.data import corpus
from pretrainax.data.objectives import CausalLM, MaskedLM, SentenceOrderPrediction
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.preparation.tokenizer import sample_texts
from pretrainax.data.preparation.workers import Workers
from pretrainax.data.sources import JsonLines, PythonDocs, SourceMixture, TextFiles
from pretrainax.tokenization import ByteBPE, Characters, WordPiece

ROOT = os.path.dirname(os.path.dirname(pretrainax.__file__))


@pytest.fixture
def lines(tmp_path):
    """Writes a folder of six files of ten documents."""
    folder = tmp_path / "lines"
    folder.mkdir()
    for i in range(6):
        documents = [{"text": f"file {i} document {j}\n" * 3} for j in range(10)]
        (folder / f"{i}.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    return folder


def experiment(tmp_path, source, tokenizer=None, *, workers=1, vocab_size=512, objective=None):
    return Experiment(
        model=ModelConfig(vocab_size=vocab_size),
        tokenizer=tokenizer or Characters(),
        data=DataConfig(source, sequence_length=16, cache_dir=str(tmp_path / "cache"), prepare_workers=workers),
        objective=objective or CausalLM(),
        optimizer=None,
        schedule=None,
    )


def quietly(*_):
    pass


def run(*args, **kwargs):
    return prepare(experiment(*args, **kwargs), report=quietly)


def tokens(prepared):
    return [split.window(0, split.num_tokens)[0] for split in (prepared.train[0], prepared.valid[0])]


def files(folder, pattern):
    return sorted(pathlib.Path(folder).rglob(pattern))


# --- the prepared corpus -------------------------------------------------------------------------------------------


def test_corpus_holds_the_text_of_the_source(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    prepared = run(tmp_path, TextFiles(str(tmp_path / "a.txt")))
    assert prepared.tokenizer.decode(prepared.train[0].document(0)) == "0123456789" * 9 + "</s>"
    assert prepared.tokenizer.decode(prepared.valid[0].document(0)) == "0123456789</s>"


@pytest.mark.slow
def test_two_processes_make_what_one_makes(tmp_path, lines):
    source = JsonLines(str(lines), valid_fraction=0.3)
    one = run(tmp_path / "1", source, ByteBPE(vocab_size=270), workers=1)
    two = run(tmp_path / "2", source, ByteBPE(vocab_size=270), workers=2)
    assert one.tokenizer.fingerprint == two.tokenizer.fingerprint
    for a, b in zip(tokens(one), tokens(two), strict=True):
        np.testing.assert_array_equal(a, b)


def test_summary_counts_both_splits_and_what_was_skipped(tmp_path, lines):
    with open(lines / "0.jsonl", "a") as f:
        f.write('{"text": ""}\n{"text": 3.5}\n')
    prepared = run(tmp_path, JsonLines(str(lines), valid_path=str(lines / "1.jsonl"), on_error="skip"))
    wanted = "train 50 documents, 0.0 MB, {:,} tokens; valid 10 documents, 0.0 MB, {:,} tokens; "
    wanted = wanted.format(prepared.train[0].num_tokens, prepared.valid[0].num_tokens)
    assert prepared.summary.startswith(wanted + "skipped 1 broken lines; skipped 1 empty documents; prepared in")


@pytest.mark.slow
def test_python_docs_are_prepared_by_two_processes(tmp_path, monkeypatch):
    shards = PythonDocs.shards
    monkeypatch.setattr(PythonDocs, "shards", lambda self, split: shards(self, split)[:2])  # 2 of 40
    prepared = run(tmp_path, PythonDocs(), workers=2)
    text = prepared.tokenizer.decode(prepared.train[0].window(0, prepared.train[0].num_tokens)[0])
    assert "Return" in text and "the" in text


def test_objective_of_sentences_gets_their_ends(tmp_path, lines):
    source, objective = JsonLines(str(lines), valid_fraction=0.3), SentenceOrderPrediction()
    (tmp_path / "lines" / "0.jsonl").write_text(json.dumps({"text": "Number one. Number two! And the third?"}) + "\n")
    tokenizer = WordPiece(vocab_size=60)
    plain = run(tmp_path, source, tokenizer, objective=MaskedLM())
    split = run(tmp_path, source, tokenizer, objective=objective)
    assert (plain.train[0].parts, split.train[0].parts) == (None, "sentences")
    assert plain.train[0].fingerprint != split.train[0].fingerprint
    assert plain.tokenizer.fingerprint == split.tokenizer.fingerprint
    assert sum(c.num_parts - c.num_documents for c in (split.train[0], split.valid[0])) == 2
    assert f"{split.train[0].num_documents} documents, {split.train[0].num_parts} sentences" in split.summary


@pytest.fixture
def mixture(tmp_path, lines):
    """Mixes the documents of `lines` with ten Greek pairs."""
    pairs = [{"text": f"α {i}", "target": f"ω {i}"} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    greek = JsonLines(str(tmp_path / "pairs.jsonl"), target_field="target", valid_fraction=0.3)
    return SourceMixture((JsonLines(str(lines), valid_fraction=0.3), greek), weights=(0.9, 0.1))


def test_each_source_of_a_mixture_has_a_corpus(tmp_path, mixture):
    prepared = run(tmp_path, mixture, workers=2)
    assert [c.parts for c in (*prepared.train, *prepared.valid)] == [None, "pairs"] * 2
    assert [a.num_documents + b.num_documents for a, b in zip(prepared.train, prepared.valid, strict=True)] == [60, 10]
    assert prepared.tokenizer.decode(prepared.train[1].document(0))[0] == "α"
    assert f"train 2 {prepared.train[1].num_documents} pairs, 0.0 MB" in prepared.summary


def test_tokenizer_learns_from_each_source(tmp_path, mixture):
    prepared = run(tmp_path, mixture, WordPiece(vocab_size=60), objective=MaskedLM())
    greek = prepared.train[1].tokens(0, prepared.train[1].num_tokens)
    assert prepared.tokenizer.vocabulary.unk not in greek


@pytest.mark.parametrize("sizes", [[100_000, *[50] * 99], [100] * 1000], ids=["one long file", "many short files"])
def test_tokenizer_learns_from_half_of_its_bytes_or_more(tmp_path, sizes):
    for i, size in enumerate(sizes):
        (tmp_path / f"{i:04}.txt").write_text("x" * size)
    source = TextFiles(str(tmp_path), valid_path=str(tmp_path / "0001.txt"))
    with Workers(1) as workers:
        sampled = {limit: sum(map(len, sample_texts(source, limit, workers))) for limit in (60_000, 10**6)}
    assert 30_000 <= sampled[60_000] <= 60_000 and sampled[10**6] == sum(sizes) - sizes[1]


def test_corpus_of_a_source_serves_each_mixture_with_it(tmp_path, mixture):
    mixed = run(tmp_path, mixture)
    mixed.tokenizer.save(str(tmp_path / "saved"))
    alone = run(tmp_path, mixture.sources[0], Characters(path=str(tmp_path / "saved")))
    assert alone.train[0].directory == mixed.train[0].directory


def test_text_that_was_made_plain_has_a_fingerprint_of_its_own(tmp_path):
    """A run on an earlier version's corpus, with carriage returns, must not continue on this corpus."""
    for name, content in (("plain", b"one\ntwo\n" * 50), ("windows", b"one\r\ntwo\r\n" * 50)):
        (tmp_path / f"{name}.txt").write_bytes(content)
    plain, windows = (run(tmp_path, TextFiles(str(tmp_path / f"{name}.txt"))) for name in ("plain", "windows"))
    a, b = (prepared.tokenizer.decode(prepared.train[0].document(0)) for prepared in (plain, windows))
    assert a[:100] == b[:100]
    assert "skipped 100 carriage returns" in windows.summary and "carriage" not in plain.summary
    assert windows.train[0].fingerprint.endswith("train-plain") and plain.train[0].fingerprint.endswith("train")


def test_damaged_tokenizer_is_made_anew_and_said(tmp_path, lines):
    source, said = JsonLines(str(lines), valid_fraction=0.3), []
    first = run(tmp_path, source, ByteBPE(vocab_size=270))
    (path,) = files(tmp_path / "cache" / "tokenizers", "tokenizer.json")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"e", b"f", 1))
    again = prepare(experiment(tmp_path, source, ByteBPE(vocab_size=270)), report=said.append)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint and path.read_bytes() == content
    assert said[0] == f"the tokenizer in {path.parent} is damaged and will be rebuilt"


def test_damaged_index_is_made_anew_and_said(tmp_path, lines):
    source, said = JsonLines(str(lines), valid_fraction=0.3), []
    first = run(tmp_path, source)
    path = pathlib.Path(first.train[0].directory) / "index.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"1", b"2", 1))
    prepare(experiment(tmp_path, source), report=said.append)
    assert path.read_bytes() == content and said[0] == f"the index of {path.parent} is damaged and will be rebuilt"


# --- the cache -----------------------------------------------------------------------------------------------------


def test_second_time_nothing_is_written(tmp_path, lines):
    source, said = JsonLines(str(lines), valid_fraction=0.3), []
    run(tmp_path, source)
    before = {f: f.stat().st_mtime_ns for f in files(tmp_path / "cache", "*")}
    again = prepare(experiment(tmp_path, source), report=said.append)
    assert {f: f.stat().st_mtime_ns for f in files(tmp_path / "cache", "*")} == before
    assert said == [] and again.summary.endswith(f"from {tmp_path / 'cache'}")


def test_changed_file_makes_another_corpus(tmp_path, lines):
    source = JsonLines(str(lines), valid_fraction=0.3)
    before = run(tmp_path, source)
    with open(lines / "5.jsonl", "a") as f:
        f.write('{"text": "one more"}\n')
    after = run(tmp_path, source)
    assert after.train[0].num_documents + after.valid[0].num_documents == 61
    assert before.train[0].fingerprint != after.train[0].fingerprint


def test_tokenizer_of_a_path_serves_another_corpus(tmp_path, lines):
    first = run(tmp_path, JsonLines(str(lines), valid_fraction=0.3))
    first.tokenizer.save(str(tmp_path / "saved"))
    (tmp_path / "other.txt").write_text("file document" * 20)
    other = run(tmp_path, TextFiles(str(tmp_path / "other.txt")), Characters(path=str(tmp_path / "saved")))
    assert other.tokenizer.fingerprint == first.tokenizer.fingerprint


SLOW = """
import sys, time
from pretrainax.config import DataConfig, Experiment, ModelConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import JsonLines
from pretrainax.data.preparation.prepare import prepare
from pretrainax.tokenization import Characters

class SlowLines(JsonLines):
    def read(self, shard, skipped):
        for text in super().read(shard, skipped):
            time.sleep(float(sys.argv[3]))
            yield text

if __name__ == "__main__":
    folder, cache, _, workers, tokenizer = sys.argv[1:]
    source = SlowLines(folder, valid_fraction=0.3)
    data = DataConfig(source, sequence_length=16, cache_dir=cache, prepare_workers=int(workers))
    prepare(Experiment(ModelConfig(vocab_size=512), Characters(path=tokenizer), data, CausalLM(), None, None))
"""


@pytest.mark.first(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_run_goes_on_where_it_was(tmp_path, lines, workers):
    (tmp_path / "slow.py").write_text(SLOW)
    wanted = run(tmp_path / "whole", JsonLines(str(lines), valid_fraction=0.3))
    wanted.tokenizer.save(str(tmp_path / "tokenizer"))
    cache = tmp_path / "cache"

    def start(delay):
        command = [sys.executable, "slow.py", str(lines), str(cache), str(delay), str(workers), "tokenizer"]
        environment = {**os.environ, "PYTHONPATH": ROOT}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)

    process = start(0.03)
    deadline = time.monotonic() + 60
    while len(files(cache, "0*.json")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    children = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {f: f.stat().st_mtime_ns for f in files(cache, "0*.json")}
    assert len(done) >= 2 and not files(cache, "index.json")

    assert start(0).wait(60) == 0
    assert done.items() <= {f: f.stat().st_mtime_ns for f in files(cache, "0*.json")}.items()
    assert not files(cache, "*.tmp*")
    for split in ("train", "valid"):
        (index,) = files(cache, f"{split}/index.json")
        resumed, whole = corpus.Corpus(str(index.parent)), getattr(wanted, split)[0]
        np.testing.assert_array_equal(resumed.window(0, whole.num_tokens)[0], whole.window(0, whole.num_tokens)[0])
    assert wait_until_gone(children)


def children_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            return [int(child) for child in f.read().split()]
    except FileNotFoundError:  # not Linux, or a kernel without this file
        return []


def wait_until_gone(pids):
    """Waits until every process has ended, or is a zombie that its new parent has not collected. Returns True if so."""

    def runs(pid):
        try:
            with open(f"/proc/{pid}/stat") as f:
                return f.read().rsplit(")", 1)[1].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + 10
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(runs, pids))


@pytest.mark.slow
def test_two_runs_at_a_time_end_with_one_corpus(tmp_path, lines):
    (tmp_path / "slow.py").write_text(SLOW)
    run(tmp_path / "whole", JsonLines(str(lines), valid_fraction=0.3)).tokenizer.save(str(tmp_path / "tokenizer"))
    command = [sys.executable, "slow.py", str(lines), str(tmp_path / "cache"), "0.1", "1", "tokenizer"]
    both = [
        subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(text.count("tokenizing train") for text in said) == 1
    assert sum(text.count("waiting for another process") for text in said) >= 1


# --- failures ------------------------------------------------------------------------------------------------------


def test_broken_line_is_named_from_another_process(tmp_path, lines):
    run(tmp_path, JsonLines(str(lines), valid_fraction=0.3)).tokenizer.save(str(tmp_path / "tokenizer"))
    with open(lines / "3.jsonl", "a") as f:
        f.write("{broken\n")
    source, tokenizer = JsonLines(str(lines), valid_fraction=0.3), Characters(path=str(tmp_path / "tokenizer"))
    with pytest.raises(UserError, match=r"3\.jsonl:11: broken JSON at column 2"):
        run(tmp_path, source, tokenizer, workers=2)


def test_source_without_training_text_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text(" \n" * 10)
    with pytest.raises(
        UserError, match=r"config\.data\.source holds no text to train a tokenizer on: TextFiles\(path="
    ):
        run(tmp_path, TextFiles(str(tmp_path / "a.txt")), ByteBPE())


def test_source_without_documents_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text(" \n" * 10)
    with pytest.raises(UserError, match=r"config\.data\.source holds no document for train: TextFiles\(path="):
        run(tmp_path, TextFiles(str(tmp_path / "a.txt")))


def test_source_without_validation_documents_says_what_to_set(tmp_path, lines):
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(UserError, match=r"no document for valid; set config\.data\.source\.valid_path, or a larger"):
        run(tmp_path, JsonLines(str(lines), valid_path=str(tmp_path / "blank.jsonl")))


def test_empty_file_for_validation_is_named_if_duplicates_are_dropped(tmp_path, lines):
    (tmp_path / "empty.jsonl").write_text("")
    made = experiment(tmp_path, JsonLines(str(lines), valid_path=str(tmp_path / "empty.jsonl")))
    made.data.drop_duplicates = True
    with pytest.raises(UserError, match=r"no document for valid; set config\.data\.source\.valid_path"):
        prepare(made, report=quietly)


def test_tokenizer_that_does_not_fit_the_model_is_an_error(tmp_path, lines):
    with pytest.raises(UserError, match=r"ids, config\.model\.vocab_size is 10: it must be at least"):
        run(tmp_path, JsonLines(str(lines)), vocab_size=10)


def test_tokenizer_that_does_not_fit_the_objective_is_an_error(tmp_path, lines):
    with pytest.raises(UserError, match="mask"):
        run(tmp_path, JsonLines(str(lines)), objective=MaskedLM())


def test_cache_that_cannot_be_made_is_an_error(tmp_path, lines):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(
        UserError, match=r"cannot write to .*cache \(.*\); set config\.data\.cache_dir to a writable folder"
    ):
        run(tmp_path, JsonLines(str(lines)))


def test_full_disk_is_explained(tmp_path, lines, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match=r"no space left in .*cache; finished files are saved\. Free some space"):
        run(tmp_path, JsonLines(str(lines)))


def test_source_that_vanishes_is_named(tmp_path, lines, monkeypatch):
    source = JsonLines(str(lines), valid_fraction=0.3)
    monkeypatch.setattr(JsonLines, "fingerprint", lambda self: os.remove(lines / "0.jsonl") or "x")
    shards = source.shards("train")
    monkeypatch.setattr(JsonLines, "shards", lambda self, split: shards)
    with pytest.raises(
        UserError, match=r"cannot read .*0\.jsonl \(No such file or directory\); see config\.data\.source"
    ):
        run(tmp_path, source)


def test_killed_worker_is_explained():
    with Workers(2) as workers, pytest.raises(UserError, match=r"config\.data\.prepare_workers is 2, set it lower"):
        list(workers.run(os._exit, [(1,), (1,)]))


def test_failure_in_a_process_apart_is_raised_here():
    with Workers(2) as workers, pytest.raises(UserError, match="is enough for"):
        workers.apart(ByteBPE(vocab_size=9999).build, ["a b"])


def test_killed_process_apart_is_explained():
    with Workers(2) as workers, pytest.raises(UserError, match="the process that trains the tokenizer ended"):
        workers.apart(os._exit, 1)


# --- the command ---------------------------------------------------------------------------------------------------

CONFIG = """
from pretrainax.config import DataConfig, Experiment, ModelConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import JsonLines
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import Characters

def get_config(variant=""):
    data = DataConfig(JsonLines("lines", valid_fraction=0.3), sequence_length=16, cache_dir="cache", prepare_workers=2)
    return Experiment(ModelConfig(vocab_size=64), Characters(), data, CausalLM(), AdamW(), WarmupCosine(5))
"""


def command(tmp_path, *flags):
    (tmp_path / "config.py").write_text(CONFIG)
    return subprocess.run(
        [sys.executable, "-m", "pretrainax.prepare", "--config=config.py", *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_command_prepares_and_prints_the_summary(tmp_path, lines):
    done = command(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("train ") and files(tmp_path / "cache", "train/index.json")


@pytest.mark.slow
def test_command_prepares_a_share(tmp_path, lines):
    done = command(tmp_path, "--shard=1/2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("share 1 of 2 is done; after all shares, run the same command once")
    assert "--report needs all shards" in command(tmp_path, "--shard=1/2", "--report=x").stderr
    assert command(tmp_path, "--shard=2/2").stderr.startswith("pretrainax: --shard is '2/2', it must be i/n")


@pytest.mark.slow
def test_command_ends_with_one_line_on_bad_input(tmp_path, lines):
    done = command(tmp_path, "--config.data.source.path=nowhere")
    assert done.returncode == 2
    assert done.stderr == "pretrainax: config.data.source.path is 'nowhere', which does not exist\n"
