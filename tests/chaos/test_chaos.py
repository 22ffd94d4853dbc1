"""Runs one or two trials of each script in this folder."""

import random
import sys

import pytest

from pretrainax.config import UserError
from pretrainax.data.preparation.prepare import prepare
from pretrainax.data.sources import TextFiles
from tests.chaos import cache_files, checkpoint_files, kill
from tests.chaos.surroundings import Surroundings
from tests.chaos.terminal import Terminal
from tests.chaos.workdirs import Workdirs
from tests.support import runs, tiny
from tests.support.tiers import few

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> runs.Whole:
    return runs.Whole(f"{runs.TINY}:gpt", tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("what", few(["train", "export"], ["export"]))  # tests/test_main.py kills a training
def test_a_command_that_was_killed_ends_bit_identical_when_it_is_run_again(what, undisturbed, tmp_path):
    kill.KILL[what](undisturbed, tmp_path, random.SystemRandom(), times=1)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    return checkpoint_files.two_steps(tmp_path_factory.mktemp("files"))


def test_every_file_of_a_checkpoint_that_is_damaged_in_some_way_is_named_and_the_step_before_is_taken(two_steps):
    rng = random.Random(0)
    for file in checkpoint_files.files(two_steps / "20"):
        for damage in rng.sample(list(checkpoint_files.damages(4, rng).values()), 3):
            checkpoint_files.try_one(two_steps, file, damage)


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "not finished"])
def test_a_bit_of_any_file_of_a_cache_that_is_another_one_is_named_or_harmless(finished, tmp_path):
    cache, rng = cache_files.Cache(tmp_path, finished), random.Random(1)
    found = {kind: cache.survives(rng.choice(paths), rng) for kind, paths in cache.files().items()}
    assert {"tokens", "npz", "documents.bin", "figures.json", "starts.npy"} < found.keys()
    assert found["tokens"] == "named"  # all other files can be rebuilt, or have no effect


@pytest.mark.parametrize("damage", [damage for damage in cache_files.DAMAGES if damage != "flipped"])
def test_each_file_of_a_cache_that_is_missing_or_another_one_is_named_or_harmless(damage, tmp_path):
    cache, rng = cache_files.Cache(tmp_path), random.Random(0)
    for kind, paths in cache.files().items():
        for path in paths if damage == "of_another_split" else [rng.choice(paths)]:
            assert cache.survives(path, rng, damage) in ("named", "harmless"), kind


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_in_a_line_and_goes_on_when_there_is_room(undisturbed):
    args = ["--only=full_everywhere", f"--whole={undisturbed.folder}"]
    done = runs.run([sys.executable, "-m", "tests.chaos.disk", *args])
    if "skip  all" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_hostile_store_writes_nothing_outside_and_nothing_is_lost(scheme):
    """Runs some trials of `python -m tests.chaos.hostile_store`, without the trials that wait for a store."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'pretrainax[s3]'")
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install 'pretrainax[gcs]'")
    args = ["--trials=6", f"--stores={scheme}", "--left_out=command,busy,refusing"]
    done = runs.run([sys.executable, "-m", "tests.chaos.hostile_store", *args])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 trials" in done.stdout and ", 0 failed" in done.stdout


@pytest.mark.slow  # tests/storage has its own kills, faults and flips
def test_what_a_store_does_and_kills_change_nothing(undisturbed):
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'pretrainax[s3]'")
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install 'pretrainax[gcs]'")
    args = ["--times=1", "--only=busy", f"--whole={undisturbed.folder}"]
    done = runs.run([sys.executable, "-m", "tests.chaos.store", *args])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 survived" in done.stdout


@pytest.mark.slow
def test_clocks_network_home_and_user_have_no_effect(undisturbed, tmp_path):
    try:
        Surroundings(undisturbed, tmp_path).all_at_once()
    except runs.Skipped as e:
        pytest.skip(str(e))


@pytest.mark.slow
def test_another_text_under_a_run_that_resumes_is_refused(undisturbed, tmp_path):
    """The tokenizer is given, so only the fingerprint of the text can show the change."""
    text, workdir = runs.write_text(tmp_path / "text"), tmp_path / "run"
    given = f"--config.tokenizer.path={undisturbed.run / 'tokenizer'}"
    args = runs.command(undisturbed.config, workdir, text, undisturbed.cache, given, "--config.train.steps=2")
    done = runs.run(args)
    assert done.returncode == 0, done.stderr
    before = runs.files(workdir)
    (text / "0.txt").write_bytes((text / "0.txt").read_bytes().replace(b"a", b"o", 1))
    failed = runs.run(args)
    assert failed.returncode == 2
    assert "the text of config.data.source" in runs.last_line(failed)
    assert runs.files(workdir) == before


def test_a_text_that_changes_while_it_is_tokenized_is_refused_and_prepared_anew(tmp_path):
    experiment, text = tiny.get_config("gpt"), runs.write_text(tmp_path / "text")
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(tmp_path / "cache")

    def change(line: str) -> None:
        if line.startswith("tokenizing train"):
            (text / "0.txt").write_text("Another text.\n" * 900)

    with pytest.raises(UserError, match="changed during tokenization"):
        prepare(experiment, report=change)
    again = prepare(experiment, report=lambda line: None)
    assert again.train[0].num_bytes + again.valid[0].num_bytes == sum(p.stat().st_size for p in text.iterdir())


@pytest.mark.slow
def test_a_second_start_while_the_first_lives_is_refused_and_changes_nothing(undisturbed, tmp_path):
    Workdirs(undisturbed, tmp_path, runs.Report()).second_start("at a save")(tmp_path / "run")


@pytest.mark.slow
def test_a_run_whose_records_are_damaged_resumes(undisturbed, tmp_path):
    """Damages one line in both files; the run must end with all other lines."""
    Workdirs(undisturbed, tmp_path, runs.Report()).damaged_records(["metrics.jsonl", "goodput.json"], "a line of zeros")


@pytest.mark.slow
def test_a_run_whose_terminal_hangs_up_saves_and_resumes(undisturbed, tmp_path):
    Terminal(undisturbed, tmp_path).the_terminal_hangs_up()


@pytest.mark.slow
def test_a_run_that_can_start_too_few_threads_ends_in_a_line(undisturbed, tmp_path):
    Terminal(undisturbed, tmp_path).few_threads(times=1)
