"""Verification passes for a config that resumes, and fails if batches are not a function of the step."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from pretrainax.config import MeshConfig, Phase, UserError, phases_of
from pretrainax.config.config_file import config_names, read_config_file
from pretrainax.config.overrides import set_field
from pretrainax.runs.resume_check import Trial, compare_losses
from pretrainax.runs.row_recorder import row_digests
from pretrainax.studies.arms import configured
from pretrainax.studies.study import Arm
from pretrainax.verify_resume import _config_arguments, _devices, _overrides
from tests.support import tiny
from tests.support.runs import FAST, ROOT


def verify(config, text, cache, *flags) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            *(sys.executable, "-m", "pretrainax.verify_resume", f"--config={config}"),
            *(f"--config.data.source.path={text}", f"--config.data.cache_dir={cache}", *flags),
        ],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST},
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
def test_a_config_that_resumes_passes_also_where_its_phases_change(text, cache):
    phases = "--config.phases=(Phase(steps=20, sequence_length=16, global_batch_size=16), Phase(dropout_rate=0.1))"
    out = verify("tests/support/tiny.py:gpt", text, cache, "--steps=6", "--kills=1", "--processes=2", phases)
    assert out.returncode == 0, out.stdout + out.stderr
    assert "undisturbed run: 6 steps" in out.stdout and "2 × cpu" in out.stdout
    assert out.stdout.count("6 steps bit-identical") == 2  # the killed run, and the run that 2 processes resumed
    assert "killed at step 3, resumed by 2 processes" in out.stdout
    assert out.stdout.splitlines()[-1] == "all checks pass: the config resumes"


def test_the_killed_run_has_the_programs_of_the_other(tmp_path):
    """On a GPU, two compilations may differ, so the runs share programs. On other platforms, a run stores none."""
    whole, killed, other = (Trial(str(tmp_path / name), [], 1) for name in ("whole", "killed", "other"))
    other.copy_programs(whole)
    (programs := tmp_path / "whole" / "run" / "xla").mkdir(parents=True)
    (programs / "jit_step-1-cache").write_text("kernels")
    killed.copy_programs(whole)
    assert (tmp_path / "killed" / "run" / "xla" / "jit_step-1-cache").read_text() == "kernels"
    assert not (tmp_path / "other" / "run").exists()


def test_phases_keep_their_shares_of_the_short_run():
    experiment = tiny.get_config("gpt")
    experiment.phases = (Phase(tokens=8 * 32 * 10), Phase(share=0.5, sequence_length=16), Phase(steps=10))
    experiment.checkpoint.keep_at = (1, 40)
    for flag in _overrides(experiment, 8):
        set_field(experiment, *flag.removeprefix("--").split("=", 1))
    found = [(phase.stop, phase.changes) for phase in phases_of(experiment)]
    assert found == [(2, ""), (6, "sequence_length 16"), (8, "")] and experiment.checkpoint.keep_at == ()


def test_each_config_has_a_valid_short_run():
    """The schedules of SmolLM and OLMoE anneal in more steps than the short run has."""
    for name in config_names():
        configured(Arm("", name, tuple(_overrides(read_config_file(name), 20))))


@pytest.mark.slow
def test_batches_that_are_not_the_same_again_are_found(text, cache, tmp_path):
    (tmp_path / "restless.py").write_text(
        textwrap.dedent(
            '''
            import dataclasses
            import random

            from pretrainax.data.objectives import CausalLM
            from tests.support import tiny


            @dataclasses.dataclass
            class Restless(CausalLM):
                """CounterRng from a generator that nobody seeds."""

                def example(self, tokens, *others):
                    example = super().example(tokens, *others)
                    example["tokens"] = example["tokens"].copy()
                    example["tokens"][-1] = random.randrange(10, 300)
                    return example


            def get_config(variant=""):
                experiment = tiny.get_config("gpt")
                experiment.objective = Restless()
                return experiment
            '''
        )
    )
    out = verify(tmp_path / "restless.py", text, cache, "--steps=4", "--kills=1", "--processes=1")
    assert out.returncode == 1, out.stdout + out.stderr
    lines = out.stdout.splitlines()
    assert lines[-1] == "FAILED: the config does NOT resume as it should"
    assert "batches     4 of 4 steps differ" in out.stdout and lines[-4].endswith("✗")


@pytest.mark.slow
def test_a_run_that_fails_is_one_line(text, cache):
    flags = ["--config.optimizer.learning_rate=1e30", "--config.train.on_nonfinite=stop"]
    out = verify("tests/support/tiny.py:gpt", text, cache, "--steps=6", *flags)
    assert out.returncode == 1
    assert out.stderr.startswith("pretrainax: a run ended with exit code 1: pretrainax: not finite at step")


def test_only_flags_of_the_config_are_passed_on():
    words = "--steps=3 --config configs/x.py --kills 2 --config.train.seed=1 --noconfig.train.x --debug --workdir=w"
    assert _config_arguments(words.split()) == [
        *("--config", "configs/x.py", "--config.train.seed=1", "--noconfig.train.x")
    ]


@pytest.mark.parametrize(
    "mesh, processes, devices",
    [
        (MeshConfig(), 2, 2),
        (MeshConfig(fsdp=4), 2, 4),
        (MeshConfig(tensor=2), 3, 6),
        (MeshConfig(data=2, fsdp=2), 2, 4),
        (MeshConfig(data=4, slices=2), 2, 4),
        (MeshConfig(fsdp=2, slices=2), 2, 4),
        (MeshConfig(data=2, fsdp=-1, slices=2), 3, 6),
    ],
)
def test_the_mesh_fits_on_the_devices_and_the_processes(mesh, processes, devices):
    assert _devices(mesh, processes) == devices


def test_processes_that_do_not_divide_the_mesh_are_refused():
    with pytest.raises(UserError, match="--processes=3 does not divide the 4 devices of config.mesh"):
        _devices(MeshConfig(data=4), 3)


def test_a_digest_is_of_a_row_whatever_the_process_that_has_it():
    batch = {"b": np.arange(12).reshape(4, 3), "a": np.arange(4.0)}
    halves = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    whole = row_digests(batch)
    assert whole == row_digests(halves[0]) + row_digests(halves[1]) and len(set(whole)) == 4
    batch["b"][3, 2] += 1
    assert [a == b for a, b in zip(whole, row_digests(batch), strict=True)] == [True, True, True, False]


@pytest.mark.parametrize(
    "pairs, missing, tolerance, good, text",
    [
        ([(1.0, 1.0), (None, None)], False, 0.0, True, "2 bit-identical"),
        ([(1.0, 1.0 + 1e-15)], False, 0.0, False, "1 of 1 differ, relative difference at most 1.1e-15; allowed: 0"),
        ([(1.0, 1.00001)], False, 2e-5, True, "1 of 1 differ"),
        ([(1.0, 1.00003)], False, 2e-5, False, "1 of 1 differ"),
        ([(1.0, None)], False, 2e-5, False, "not finite in one of the two"),
        ([(1.0, 1.0)], True, 2e-5, False, "different steps"),
    ],
)
def test_losses_are_judged_by_what_is_allowed(pairs, missing, tolerance, good, text):
    row = compare_losses("", "losses", pairs, missing, tolerance)
    assert row.good == good and row.found.startswith(text)
