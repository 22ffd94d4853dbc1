"""Commands with folders in a bucket, each in a separate process, write the same results as on a disk."""

import json
import os
import re
import signal
import sys
import time

import pytest

from pretrainax.storage.store import Store
from tests.support import runs

pytestmark = pytest.mark.slow

RUN, CACHE, TEXT = "gs://bucket/runs/a", "gs://bucket/cache", "gs://bucket/text/*.txt"
FLAGS = ("--config.train.steps=12", "--config.evaluate.every=6", runs.SAVING)


@pytest.fixture
def bucket(gcs, tmp_path, monkeypatch):
    """Serves a bucket with text, also to other processes."""
    for name, value in {"FSSPEC_GS_ENDPOINT_URL": gcs.url, "FSSPEC_GS_TOKEN": "anon"}.items():
        monkeypatch.setitem(runs.ENV, name, value)
    monkeypatch.setitem(runs.ENV, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setitem(runs.ENV, "XDG_CACHE_HOME", str(tmp_path / "machine"))
    for file in runs.write_text(tmp_path / "text").iterdir():
        Store("gs://bucket/text").put(str(file), file.name)
    return gcs


@pytest.fixture
def touched(tmp_path, monkeypatch):
    """Returns the file in which other processes record each URL that they use as a local path."""
    monkeypatch.setitem(runs.ENV, "PYTHONPATH", str(runs.ROOT / "tests" / "support" / "watched"))
    monkeypatch.setitem(runs.ENV, "URLS_TOUCHED", str(tmp_path / "touched"))
    return tmp_path / "touched"


def train(workdir, text, cache, *more):
    return runs.run(runs.command(f"{runs.TINY}:gpt", workdir, text, cache, *FLAGS, *more))


def lines(folder):
    """Returns the lines of metrics.jsonl without timings."""
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        found = [json.loads(line) for line in f]
    return [{name: x for name, x in line.items() if name not in runs.TIMINGS} for line in found]


def of_url(url):
    """Returns the content of metrics.jsonl of a run in the bucket, from its objects."""
    store = Store(url)
    text = b"".join(store.read(name) for name in store.objects() if name.startswith("metrics.jsonl."))
    found = [json.loads(line) for line in text.splitlines()]
    return [{name: x for name, x in line.items() if name not in runs.TIMINGS} for line in found]


def test_no_url_is_taken_for_a_file(bucket, touched, tmp_path):
    """No command may call `open("gs://bucket/a")` for any of its arguments; the test checks the hook itself first."""
    runs.run([sys.executable, "-c", "import os; os.path.exists('gs://bucket'); open('s3:/a', 'a')"])
    assert touched.read_text() == "stat gs://bucket\nopen s3:/a\n"
    touched.write_text("")
    done = train(RUN, TEXT, CACHE, "--config.checkpoint.keep=1", "--config.train.profile_steps=3:4")
    assert done.returncode == 0, done.stderr
    assert f"{RUN}, no checkpoint was sent yet" in done.stderr  # the header's row of the workdir
    assert re.search(r"goodput .*, 1 start, (last sent: step (6|10|12)|no checkpoint was sent yet)\n", done.stderr)
    assert f"{RUN} has all files (last sent: step 12)" in done.stderr
    # The value depends on the time of writing.
    assert json.loads(Store(RUN).read("goodput.json"))[-1]["last_sent"] in (None, 6, 10, 12)
    said = [done.stderr]
    module = [sys.executable, "-m"]
    for command in (
        [*module, "pretrainax.evaluate", f"--from={RUN}@best", f"--source=TextFiles(path='{TEXT}')", "--documents=2"],
        [*module, "pretrainax.evaluate", f"--from={RUN}", "--every-checkpoint"],
        [*module, "pretrainax.profile", f"--workdir={RUN}"],
        [*module, "pretrainax.report", RUN, "--output=gs://bucket/report"],
        [*module, "pretrainax.inspect", f"--config={runs.TINY}:gpt", f"--config.data.source.path={TEXT}"]
        + [f"--config.data.cache_dir={CACHE}", "--html=gs://bucket/rows.html"],
        runs.exporting(RUN, "gs://bucket/export"),
        [*module, "pretrainax.huggingface", "import", "--from=gs://bucket/export", "--workdir=gs://bucket/again"]
        + ["--noverify"],
    ):
        done = runs.run(command)
        assert done.returncode == 0, done.stderr
        said += [done.stdout, done.stderr]
    lines_said = [line for text in said for line in text.splitlines() if "has a local copy in" not in line]
    assert [line for line in lines_said if str(tmp_path) in line] == []  # no output names local folders
    assert "a: last sent: step 12\n" in said[8]  # report's stderr
    found = Store("gs://bucket").objects().keys()
    assert {"report.html", "report.png", "rows.html", "export/model.safetensors", "again/config.json"} <= found
    assert any(name.startswith("runs/a/evaluations/text-step_12") for name in found)
    assert touched.read_text() == ""


@pytest.mark.slow
def test_a_run_is_trained_read_exported_and_started_from_in_a_bucket(bucket, tmp_path, monkeypatch):
    done = train(RUN, TEXT, CACHE)
    assert done.returncode == 0, done.stderr
    on_disk = train(tmp_path / "disk", tmp_path / "text", tmp_path / "cache")
    assert on_disk.returncode == 0, on_disk.stderr
    assert of_url(RUN) == lines(tmp_path / "disk")
    found = Store(RUN).objects()
    assert {"config.json", "checkpoints/12/manifest.sha256", "curves.png", "tokenizer/tokenizer.json"} <= found.keys()
    assert any(name.startswith("corpora/") for name in Store(CACHE).objects())

    monkeypatch.setitem(runs.ENV, "XDG_CACHE_HOME", str(tmp_path / "another"))
    module = [sys.executable, "-m"]
    flags = ["--output=gs://bucket/results.json", "--config.data.keep_bytes=0"]
    evaluated = runs.run([*module, "pretrainax.evaluate", f"--from={RUN}@best", *flags])
    assert evaluated.returncode == 0, evaluated.stderr
    assert "token files are beyond config.data.keep_bytes=0: they stay in gs://bucket/cache" in evaluated.stderr
    assert "loss" in Store("gs://bucket").read("results.json").decode()
    exported = runs.run(runs.exporting(RUN, "gs://bucket/export"))
    assert exported.returncode == 0, exported.stderr
    assert {"config.json", "model.safetensors"} <= Store("gs://bucket/export").objects().keys()
    told = runs.run([*module, "pretrainax.generate", "--from=gs://bucket/export", "--max_new_tokens=4", "A"])
    assert told.returncode == 0, told.stderr
    more = train("gs://bucket/runs/b", TEXT, CACHE, f"--config.checkpoint.init_from={RUN}")
    assert more.returncode == 0, more.stderr
    assert "prepared in" not in more.stderr  # the corpus came from the bucket


@pytest.mark.slow
@pytest.mark.parametrize("is_other_machine", [False, True], ids=["same_machine", "other_machine"])
def test_a_run_that_is_killed_goes_on_and_ends_as_one_that_is_not(bucket, is_other_machine, tmp_path, monkeypatch):
    on_disk = train(tmp_path / "disk", tmp_path / "text", tmp_path / "cache", "--config.train.steps=40")
    assert on_disk.returncode == 0, on_disk.stderr
    resumed = False
    args = runs.command(f"{runs.TINY}:gpt", RUN, TEXT, CACHE, *FLAGS, "--config.train.steps=40")
    for number in range(3):
        if is_other_machine:
            monkeypatch.setitem(runs.ENV, "XDG_CACHE_HOME", str(tmp_path / str(number)))
        if number == 2:
            break
        process = runs.start(args)
        until = time.monotonic() + 120
        while len([n for n in Store(RUN).objects("checkpoints") if n.endswith("sha256")]) < 1 + number:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        # SIGTERM for the other machine: a lost machine does not release its lease, and the next machine would wait 90 s
        # for it.
        process.send_signal(signal.SIGTERM if is_other_machine else signal.SIGKILL)
        process.wait()
        resumed = True
    done = runs.run(args)
    assert done.returncode == 0, done.stderr
    assert resumed and re.search(r"resumed at step (\d+), last sent: step \1\n", done.stderr)
    assert of_url(RUN) == lines(tmp_path / "disk")


@pytest.mark.slow
def test_a_checkpoint_of_which_a_byte_has_flipped_in_the_bucket_is_not_used(bucket, tmp_path, monkeypatch):
    assert train(RUN, TEXT, CACHE).returncode == 0
    newest = [name for name in Store(RUN).objects("checkpoints/12/params") if "/d/" in name][0]
    content = bytearray(Store(RUN).read(newest))
    content[len(content) // 2] ^= 1
    Store(RUN).write(newest, bytes(content))
    monkeypatch.setitem(runs.ENV, "XDG_CACHE_HOME", str(tmp_path / "another"))
    done = train(RUN, TEXT, CACHE, "--config.train.steps=14", "--extend")
    assert done.returncode == 0, done.stderr
    assert "checkpoint 12 is not used" in done.stderr and "resumed at step 10" in done.stderr


def test_a_bucket_that_refuses_is_one_line_before_anything_is_prepared(bucket):
    bucket.forbids_writes = True
    done = train(RUN, TEXT, CACHE)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("pretrainax: gs://bucket/runs/a refuses this user")
