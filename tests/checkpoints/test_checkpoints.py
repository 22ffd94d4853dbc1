"""A checkpoint is restored bit for bit, or not at all."""

import concurrent.futures
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pretrainax.checkpoints.best import best_checkpoint
from pretrainax.checkpoints.checkpoints import Checkpoints
from pretrainax.checkpoints.manifest import MANIFEST
from pretrainax.checkpoints.params import load_steps
from pretrainax.checkpoints.steps import find_checkpoint, list_steps
from pretrainax.config import RunFailed, UserError
from pretrainax.runs.save_check import SaveCheck
from tests.support.checkpoints import abstract, make_state, restore, save_all
from tests.support.runs import ROOT


def kept(directory):
    return sorted(int(name) for name in os.listdir(directory))


def files_of(step_directory):
    return sorted(os.path.join(d, n) for d, _, names in os.walk(step_directory) for n in names)


# --- round trip ----------------------------------------------------------------------------------------------------


def test_state_and_extra_come_back_bit_for_bit(tmp_path):
    extra = {"step": 7, "tokenizer": "abc", "best_loss": None, "config": {"train": {"steps": 3, "rate": 0.1}}}
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    checkpoints.save(7, make_state(7), extra)
    step, state, restored_extra = checkpoints.restore_newest(abstract(make_state(0)))
    assert step == 7
    chex.assert_trees_all_equal(state, make_state(7))
    assert restored_extra == extra
    checkpoints.close()


def test_each_stage_of_a_save_is_progress(tmp_path):
    calls = []
    checkpoints = Checkpoints(str(tmp_path), keep=1, progress=lambda: calls.append(threading.current_thread().name))
    checkpoints.save(7, make_state(7), {})
    checkpoints.close()
    assert [name.partition("_")[0] for name in calls] == ["MainThread", "checkpoint", "checkpoint"]


def test_a_save_of_small_replicated_arrays_compiles_nothing(tmp_path, caplog):
    state = make_state(1)
    state = state.replace(params=jax.device_put({"scale": np.ones(24, np.float32)}, state.step.sharding))
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        checkpoints.save(1, state, {})
        checkpoints.close()
    assert "Compiling" not in caplog.text and "deprecated" not in caplog.text


@pytest.mark.parametrize("devices", [1, 4])
def test_arrays_saved_on_8_devices_come_back_on_fewer(two_steps, devices):
    (_, state, _), _ = restore(two_steps, devices)
    chex.assert_trees_all_equal(state, make_state(20))
    assert state.params["blocks"]["kernel"].sharding == make_state(0, devices).params["blocks"]["kernel"].sharding


def test_arrays_saved_on_1_device_come_back_on_4(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    checkpoints.save(1, make_state(1, devices=1), {})
    _, state, _ = checkpoints.restore_newest(abstract(make_state(0, devices=4)))
    chex.assert_trees_all_equal(state, make_state(1))
    checkpoints.close()


def test_a_state_that_is_donated_right_after_save_is_saved_as_it_was(tmp_path):
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * 2 + 1, s), donate_argnums=0)
    state = jax.tree.map(lambda x: jnp.tile(x, (4096,) + (1,) * (x.ndim - 1)) if x.ndim else x, make_state(3))
    before = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    checkpoints.save(3, state, {})
    for _ in range(3):
        state = update(state)
    _, restored, _ = checkpoints.restore_newest(abstract(state))
    chex.assert_trees_all_equal(restored, before)
    checkpoints.close()


def test_extra_is_saved_as_it_was_at_the_call(tmp_path):
    checkpoints, extra = Checkpoints(str(tmp_path), keep=1), {"best_loss": 2.5}
    checkpoints.save(1, make_state(1), extra)
    extra["best_loss"] = 1.0
    assert checkpoints.restore_newest(abstract(make_state(0)))[2] == {"best_loss": 2.5}
    checkpoints.close()


def test_no_checkpoint_is_none(tmp_path):
    assert restore(tmp_path / "checkpoints") == (None, [])


def test_the_manifest_is_what_sha256sum_checks(two_steps):
    subprocess.run(
        ["sha256sum", "--check", "--strict", MANIFEST], cwd=two_steps / "20", check=True, capture_output=True
    )


def test_a_save_waits_for_the_one_before(tmp_path):
    save_all(tmp_path, [1, 2, 3])  # without a pause between them
    assert kept(tmp_path) == [1, 2, 3]


# --- damage --------------------------------------------------------------------------------------------------------


def flip(path, position):
    with open(path, "r+b") as f:
        f.seek(position)
        byte = f.read(1)[0]
        f.seek(position)
        f.write(bytes([byte ^ 1]))


@pytest.mark.slow
def test_a_step_with_one_flipped_bit_is_never_used(copy):
    """Flips a bit at a random position of each file, including the manifest and Orbax's metadata."""
    rng = random.Random(0)
    for path in files_of(copy / "20"):
        if os.path.getsize(path):
            position = rng.randrange(os.path.getsize(path))
            flip(path, position)
            (step, state, extra), warnings = restore(copy)
            assert step == 10 and extra == {"note": "from 10"}, path
            (warning,) = warnings
            assert MANIFEST in path or f"{os.path.relpath(path, copy / '20')} changed" in warning
            flip(path, position)
    assert restore(copy)[0][0] == 20  # only the flipped bits prevented its use
    chex.assert_trees_all_equal(state, make_state(10))


def array_file(step_directory):
    return max(files_of(step_directory), key=os.path.getsize)


def truncate(path):
    os.truncate(path, os.path.getsize(path) // 2)


@pytest.mark.parametrize("damage", [truncate, lambda path: os.truncate(path, 0), os.remove])
@pytest.mark.parametrize("name", ["array", MANIFEST, "_CHECKPOINT_METADATA"])
def test_a_truncated_empty_or_missing_file_is_named_and_the_step_before_is_taken(copy, damage, name):
    path = array_file(copy / "20") if name == "array" else copy / "20" / name
    damage(path)
    (step, _, _), warnings = restore(copy)
    assert step == 10
    assert re.fullmatch(rf"checkpoint 20 is not used: .*{re.escape(os.path.basename(path))}.*", warnings[0])


def test_a_file_too_many_is_named_and_the_step_before_is_taken(copy):
    (copy / "20" / "params" / "stray").write_text("?")
    (step, _, _), warnings = restore(copy)
    assert step == 10 and warnings == ["checkpoint 20 is not used: params/stray not in manifest.sha256"]


def test_a_manifest_cut_at_the_end_of_a_line_does_not_vouch_for_the_rest(copy):
    manifest = copy / "20" / MANIFEST
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:-1]))
    assert restore(copy)[0][0] == 10


def test_hidden_files_of_file_managers_do_no_harm(copy):
    (copy / "20" / ".DS_Store").write_text("?")
    assert restore(copy)[0][0] == 20


def test_when_all_are_damaged_the_error_names_each_and_nothing_is_deleted(copy):
    for step in ("10", "20"):
        truncate(array_file(copy / step))
    before = files_of(copy)
    with pytest.raises(UserError, match=r"step 20: .* changed; step 10: .* changed.*none was deleted") as error:
        restore(copy)
    assert "\n" not in str(error.value)
    assert files_of(copy) == before


def test_a_damaged_newer_step_is_replaced_when_the_run_gets_there_again(copy):
    truncate(array_file(copy / "20"))
    checkpoints = Checkpoints(str(copy), keep=1)
    assert checkpoints.restore_newest(abstract(make_state(0)))[0] == 10
    checkpoints.save(15, make_state(15), {})
    checkpoints.wait()
    assert kept(copy) == [15, 20]  # 20 does not count as the newest, and is not deleted
    checkpoints.save(20, make_state(21), {})
    step, state, _ = checkpoints.restore_newest(abstract(make_state(0)))
    assert step == 20 and checkpoints.warnings == []
    chex.assert_trees_all_equal(state.params, make_state(21).params)
    checkpoints.close()


# --- retention -----------------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(tmp_path):
    save_all(tmp_path, [1, 2, 3, 4, 5], keep=2, losses={1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.2})
    assert kept(tmp_path) == [2, 4, 5]


def test_the_newest_is_kept_however_bad_it_is(tmp_path):
    save_all(tmp_path, [1, 2, 3], keep=1, losses={1: 1.0, 2: 2.0, 3: float("nan")})
    assert kept(tmp_path) == [1, 3]


def test_a_validation_of_fewer_rows_does_not_keep_the_best_place(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), keep=1)
    for step, loss, batches in [(1, 0.5, 1), (2, 3.0, 20), (3, 2.0, 20), (4, 2.5, 20)]:
        checkpoints.save(step, make_state(step), {"valid_batches": batches}, {"loss": loss})
    checkpoints.close()
    assert kept(tmp_path) == [3, 4]
    assert best_checkpoint(str(tmp_path), "loss") == (3, 2.0, {"loss": 2.0})


def test_what_is_kept_for_good_is_no_older_step(tmp_path):
    save_all(tmp_path, [0, 1, 2, 3, 4, 5], keep=1, keeps=lambda step: step in (0, 2))
    assert list_steps(str(tmp_path)) == [0, 2, 5]


def test_steps_kept_for_good_take_no_place_of_the_newest(tmp_path):
    save_all(tmp_path, [1, 2, 3, 4, 5], keep=2, keeps=lambda step: step in (1, 4, 5))
    assert kept(tmp_path) == [1, 2, 3, 4, 5]


def test_steps_without_a_metric_are_kept_by_age_alone(tmp_path):
    save_all(tmp_path, [1, 2, 3], keep=2)
    assert kept(tmp_path) == [2, 3]


def test_leftovers_of_a_kill_are_cleared_and_a_replaced_step_gets_its_name_back(copy):
    shutil.copytree(copy / "20", copy / "30.saving.orbax-checkpoint-tmp")
    shutil.copytree(copy / "20", copy / "5.deleted")
    os.rename(copy / "20", copy / "20.replaced")
    assert restore(copy)[0][0] == 20
    assert kept(copy) == [10, 20]


# --- strictness ----------------------------------------------------------------------------------------------------


def test_another_shape_is_an_error_that_names_the_parameter(two_steps):
    checkpoints = Checkpoints(str(two_steps), keep=10)
    with pytest.raises(UserError, match=r"params/blocks/kernel is float32\[16,8\], expected float32\[16,4\]"):
        checkpoints.restore_newest(abstract(make_state(0, width=4)))
    checkpoints.close()


def test_another_optimizer_is_an_error_that_names_its_arrays(two_steps):
    state = make_state(0)
    checkpoints = Checkpoints(str(two_steps), keep=10)
    with pytest.raises(UserError, match=r"optimizer/opt_state/1/0/mu/scale float32\[3\] is unexpected"):
        checkpoints.restore_newest(abstract(state.replace(opt_state=optax.sgd(1.0).init(state.params))))
    checkpoints.close()


def test_load_steps_takes_parameters_alone(two_steps):
    params = load_steps((find_checkpoint(str(two_steps.parent)),), abstract(make_state(0, devices=4).params))
    chex.assert_trees_all_equal(params, make_state(20).params)
    assert params["blocks"]["kernel"].sharding.mesh.size == 4


def test_load_steps_names_every_parameter_that_does_not_fit(two_steps):
    params = abstract(make_state(0).params)
    params["blocks"]["bias"] = params.pop("scale")
    params["blocks"]["kernel"] = params["blocks"]["kernel"].update(dtype=jnp.bfloat16)
    with pytest.raises(UserError) as error:
        load_steps((find_checkpoint(str(two_steps.parent)),), params)
    for part in ("blocks/bias float32[3] is missing", "scale float32[3] is unexpected", "blocks/kernel is float32"):
        assert f"params/{part}" in str(error.value)


def test_load_steps_falls_back_to_the_step_before(copy):
    truncate(array_file(copy / "20"))
    chex.assert_trees_all_equal(
        load_steps((find_checkpoint(str(copy.parent)),), abstract(make_state(0).params)), make_state(10).params
    )


def test_load_steps_of_a_folder_without_checkpoints_is_an_error(tmp_path):
    with pytest.raises(UserError, match="has no checkpoint"):
        load_steps((find_checkpoint(str(tmp_path)),), abstract(make_state(0).params))


# --- kills and full disks ------------------------------------------------------------------------------------------

SAVING = """
    import sys
    from pretrainax.checkpoints.checkpoints import Checkpoints
    from tests.support.checkpoints import make_state

    checkpoints = Checkpoints(sys.argv[1], keep=2)
    state = make_state(1, devices=1, width=1 << 15)
    for step in range(1, 1000):
        checkpoints.save(step, state.replace(step=state.step * 0 + step), {"step": step})
        print(step, flush=True)
"""


def start_saving(directory, program=SAVING, **kwargs):
    command = [sys.executable, "-c", textwrap.dedent(program), str(directory)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, **kwargs)


def test_a_kill_while_saving_leaves_a_valid_checkpoint(tmp_path):
    """In each trial, a process saves without pauses until a kill at a random moment; the next one uses its folder."""
    rng = random.Random(0)
    want = abstract(make_state(0, devices=1, width=1 << 15))
    for _ in range(3):
        process = start_saving(tmp_path)
        for _ in range(4):  # when the call for the 4th save returns, saves 1 to 3 are on disk
            begun = int(process.stdout.readline())
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        begun = max([begun, *map(int, process.stdout.read().split())])
        process.wait()
        checkpoints = Checkpoints(str(tmp_path), keep=2)
        step, state, extra = checkpoints.restore_newest(want)
        checkpoints.close()
        assert step in (begun - 1, begun) and checkpoints.warnings == []
        assert int(state.step) == extra["step"] == step
        shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_a_full_disk_is_one_clear_line_and_earlier_steps_stay(tmp_path):
    """A limit on the file size replaces a full disk: writes fail at the same places."""
    program = """
        import resource, sys
        from pretrainax.checkpoints.checkpoints import Checkpoints
        from tests.support.checkpoints import make_state

        checkpoints = Checkpoints(sys.argv[1], keep=2)
        checkpoints.save(1, make_state(1, devices=1), {})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            checkpoints.save(2, make_state(2, devices=1, width=1 << 13), {})
            checkpoints.wait()
        except Exception as error:
            print(type(error).__name__, error)
    """
    process = start_saving(tmp_path, program, stderr=subprocess.PIPE)
    out, err = process.communicate()
    assert out == "RunFailed could not save step 2: File too large; earlier checkpoints are kept\n", err
    assert "Traceback" not in err
    # A temporary folder may remain, because the process ends before it is removed.
    assert list_steps(str(tmp_path)) == [1]
    assert restore(tmp_path, devices=1)[0][0] == 1


def test_a_save_that_failed_does_not_keep_the_next_from_working(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(str(tmp_path), keep=2)
    with monkeypatch.context() as patch:
        patch.setattr("pretrainax.checkpoints.manifest.write_manifest", fail)
        checkpoints.save(1, make_state(1), {})
        with pytest.raises(RunFailed, match="could not save step 1: No space left on device"):
            checkpoints.wait()
    assert os.listdir(tmp_path) == []
    checkpoints.save(1, make_state(1), {})
    checkpoints.close()
    assert kept(tmp_path) == [1]


def test_a_save_that_failed_is_reported_before_the_next(tmp_path, monkeypatch):
    """This happens on a full disk: without a check, a run would train until its next checkpoint."""
    reached, proceed = threading.Event(), threading.Event()

    def fail(path):
        reached.set()
        proceed.wait()
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(str(tmp_path), keep=2)
    monkeypatch.setattr("pretrainax.checkpoints.manifest.write_manifest", fail)
    checkpoints.save(1, make_state(1), {})
    reached.wait()
    checkpoints.check()  # still in progress
    proceed.set()
    concurrent.futures.wait([checkpoints._pending[1]])
    with pytest.raises(RunFailed, match="could not save step 1: No space left on device"):
        SaveCheck().on_step(types.SimpleNamespace(checkpoints=checkpoints), None, None)
    # The error is reported only once.
    checkpoints.check()
    monkeypatch.undo()
    checkpoints.save(2, make_state(2), {})
    checkpoints.close()
    assert kept(tmp_path) == [2]


def test_the_notes_are_json_even_where_the_loss_is_not_a_number(tmp_path):
    save_all(tmp_path, [1], losses={1: float("nan")})
    notes = json.loads((tmp_path / "1" / "run.json").read_text(), parse_constant=pytest.fail)
    assert notes["metrics"] == {"loss": None}
