"""Tests that a run that cannot fit ends before it allocates memory, and names the cheapest change that makes it fit."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import pytest

from pretrainax.config import AUTO, Phase, UserError
from pretrainax.data.sources import TextFiles
from pretrainax.planning import memory, memory_check
from pretrainax.planning.activations import config_key
from pretrainax.planning.memory_check import CPU_MARGIN, MemoryCheck
from pretrainax.runs.train import train
from pretrainax.sharding.axes import AXES
from pretrainax.sharding.mesh import mesh_sizes
from pretrainax.tokenization import ByteBPE
from tests.support import runs, tiny

ONE = dict.fromkeys(AXES, 1)
DEVICES = 8  # The same number is in tests/conftest.py.


def make(family="gpt", rows=64, **train):
    """Returns a config whose activations are much larger than its parameters."""
    experiment = tiny.get_config(family)
    experiment.train = dataclasses.replace(experiment.train, global_batch_size=rows, **train)
    experiment.data.sequence_length = 64
    experiment.data.source = TextFiles(path=".")
    return experiment


@pytest.fixture
def room(monkeypatch):
    """Returns a function that sets the memory of a device."""

    def set_memory(size):
        monkeypatch.setattr(memory_check, "device_memory", lambda: size)

    return set_memory


def estimated(experiment, devices=DEVICES, chip=None):
    return memory.estimate(experiment, mesh_sizes(experiment.mesh, devices, 1), chip).total


def refusal(experiment):
    with pytest.raises(UserError) as refused:
        MemoryCheck().resolve_fields(experiment)
    message = str(refused.value)
    assert "\n" not in message and message.endswith("; --nocheck_memory starts the run anyway")
    return message


def with_flags(experiment, message):
    """Returns the config with the flags in a message."""
    changed = dataclasses.replace(experiment)
    for group, field, value in re.findall(r"--config\.(\w+)\.(\w+)=([\w.-]+)", message):
        value = value if field == "remat" else None if value == "None" else int(value)
        setattr(changed, group, dataclasses.replace(getattr(changed, group), **{field: value}))
    return changed


def header(experiment, refuses=True):
    check = MemoryCheck(refuses)
    check.resolve_fields(experiment)
    return check.rows(SimpleNamespace(experiment=experiment))


# --- the estimate ----------------------------------------------------------------------------------------------------


@pytest.mark.first(3)
@pytest.mark.parametrize("family", ["gpt", "t5", "bert", "elmo"])
@pytest.mark.parametrize("rows, accumulate, remat", [(3, 1, "none"), (10, 2, "block"), (7, 1, "dots")])
def test_one_trace_gives_the_estimate_of_two(family, rows, accumulate, remat):
    experiment = make(family, rows, accumulate=accumulate, remat="none" if family == "elmo" else remat)
    one, two = (memory.estimate(experiment, ONE, None, single) for single in (True, False))
    assert dict(one.parts()) == pytest.approx(dict(two.parts()), rel=1e-9, abs=1)


def test_the_phase_that_needs_most_counts(room):
    experiment = make()
    room(10**12)
    ((_, plain),) = header(experiment)
    experiment.phases = (Phase(steps=10), Phase(steps=5, sequence_length=32), Phase(accumulate=2))
    assert header(experiment) == [("memory", plain.replace("(estimate)", "(estimate, phase 1)"))]
    experiment.phases = (Phase(steps=10, sequence_length=32), Phase(accumulate=2))
    ((_, other),) = header(experiment)
    assert other.endswith("(estimate, phase 2)") and other.split()[0] != plain.split()[0]


def test_the_teacher_counts(room, tmp_path):
    from pretrainax.distill import Distillation
    from tests.golden import CASES
    from tests.support.huggingface_weights import write_run

    room(10**12)
    experiment = make("gpt")
    experiment.data.sequence_length, experiment.model.position = 16, CASES["gpt2"].config.position
    alone = estimated(experiment)
    model = dataclasses.replace(CASES["gpt2"].config, vocab_size=experiment.model.vocab_size)
    experiment.distill = Distillation(teacher=str(write_run(tmp_path / "teacher", model)))
    assert estimated(experiment) > alone and header(experiment)[0][0] == "memory"


# --- header rows and errors ------------------------------------------------------------------------------------------


def test_a_run_that_fits_has_a_row_in_its_header(room):
    experiment = make()
    room(int(estimated(experiment) / CPU_MARGIN) + 1)
    ((name, value),) = header(experiment)
    assert name == "memory" and re.fullmatch(r"[\d.]+ MB of [\d.]+ MB per device \(estimate\)", value)


def test_above_the_margin_is_a_warning_and_above_the_memory_an_error(room):
    experiment = make()
    room(estimated(experiment))  # The memory equals the estimate.
    names, values = zip(*header(experiment), strict=True)
    assert names == ("memory", "WARNING") and "the estimate is above 60% of the memory" in values[1]
    room(estimated(experiment) - 1)
    assert refusal(experiment).startswith("the run needs about ")
    names, values = zip(*header(experiment, refuses=False), strict=True)
    assert names == ("memory", "WARNING") and values[1].startswith("TOO LITTLE MEMORY: the run needs about ")


def test_unknown_memory_and_what_cannot_be_estimated_are_named(room, monkeypatch):
    room(None)
    assert header(make())[0][1].endswith("per device (estimate); the memory of a cpu is unknown")
    room(10**12)
    assert header(make(rows=7)) == [("memory", header(make(rows=7))[0][1])]
    assert header(make(rows=7))[0][1].startswith("not estimated: UserError: config.train.global_batch_size 7 is not")
    monkeypatch.setattr(memory, "estimate", lambda *_: 1 / 0)
    assert header(make()) == [("memory", "not estimated: ZeroDivisionError: division by zero")]


# --- the cheapest change ---------------------------------------------------------------------------------------------


@pytest.fixture
def cached_estimates(monkeypatch):
    """Caches the estimate of each config."""
    estimates, estimate = {}, memory.estimate

    def cached(experiment, sizes, *options):
        key = config_key(experiment), tuple(sizes.values())
        if key not in estimates:
            estimates[key] = estimate(experiment, sizes, *options)
        return estimates[key]

    monkeypatch.setattr(memory, "estimate", cached)


def test_the_first_change_that_fits_is_named_and_does_fit(room, cached_estimates):
    """Tests the proposals for decreasing memory: accumulation, rematerialization, sharding, no average, no change."""
    base = make(ema_decay=0.99)
    named = []
    for size in [int(estimated(base) * 0.98**i) for i in range(1, 120)]:
        room(size)
        message = refusal(base)
        if "suffice" in message:
            break
        changed = with_flags(base, message)
        assert estimated(changed) <= CPU_MARGIN * size
        fields = tuple(re.findall(r"--config\.(\w+\.\w+)=", message))
        named += [fields] if fields not in named else []
    accumulated, recomputed = ("train.accumulate",), ("train.remat",)
    assert named[0] == accumulated and base.train.accumulate == 1
    kinds = ["train.ema_decay" in fields for fields in named], ["mesh.fsdp" in fields for fields in named]
    assert all(any(kind) for kind in kinds)
    first = {name: min(i for i, f in enumerate(named) if name in f) for name in ("mesh.fsdp", "train.ema_decay")}
    assert first["mesh.fsdp"] < first["train.ema_decay"]
    assert any({*accumulated, *recomputed} & set(fields) for fields in named[: first["mesh.fsdp"]])


def test_the_number_of_devices_that_suffice_is_the_least_of_the_doublings(room):
    experiment = make(rows=256)
    sharded = with_flags(experiment, "--config.mesh.data=1 --config.mesh.fsdp=-1 --config.train.remat=block")
    counts = [with_flags(sharded, f"--config.train.accumulate={2**i}") for i in range(5)]  # 16 devices split 256 rows.
    least = min(estimated(changed, 16) for changed in counts)
    for memory_of_device, devices in ((least, 16), (least - 1, 32)):
        room(int(memory_of_device / CPU_MARGIN) + (devices == 16))
        message = refusal(experiment)
        assert f"or add devices: {devices} suffice with " in message
        assert estimated(with_flags(experiment, message), devices) <= CPU_MARGIN * memory_check.device_memory()


def test_a_model_that_no_number_of_devices_holds_is_told_so(room):
    room(1000)
    assert "32,768 such devices would not suffice either" in refusal(make())


# --- accelerators ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A process with one GPU; returns a function that sets its kind."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(memory_check, "available_memory", lambda: 10**12)

    def of_kind(kind):
        device = SimpleNamespace(platform="gpu", device_kind=kind, memory_stats=lambda: {"bytes_limit": 60 * 10**9})
        monkeypatch.setattr(jax, "local_devices", lambda: [device])

    of_kind("NVIDIA H100 80GB HBM3")
    return of_kind


@pytest.mark.parametrize(
    "kind, variable",
    [
        ("NVIDIA H100 80GB HBM3", "XLA_CLIENT_MEM_FRACTION"),
        ("NVIDIA GeForce RTX 4090", "XLA_PYTHON_CLIENT_MEM_FRACTION"),  # its former name
        ("Tesla T4", "XLA_CLIENT_MEM_FRACTION"),
    ],
)
def test_a_gpu_is_first_given_the_memory_that_jax_leaves_free(kind, variable, gpu, room, monkeypatch):
    gpu(kind)
    chip = memory_check._Plan().chip
    experiment = make()
    needed = estimated(experiment, 1, chip)
    # The estimate assumes bfloat16, even for a GPU that the planner does not know.
    assert needed < estimated(experiment, 1)
    room(int(0.99 * needed))
    assert "set the environment variable XLA_CLIENT_MEM_FRACTION=0.92;" in refusal(experiment)
    monkeypatch.setenv(variable, "0.9")
    assert f"but a {kind} has" in refusal(experiment) and "add --config.train.accumulate=" in refusal(experiment)
    room(needed * 10)
    assert [name for name, _ in header(experiment)] == ["memory"]


def test_a_host_without_room_for_the_copy_of_a_save_is_a_warning(gpu, room, monkeypatch):
    experiment = make()
    room(10**12)
    monkeypatch.setattr(memory_check, "available_memory", lambda: 1000)
    assert header(experiment)[1][1].startswith("LITTLE HOST MEMORY: saving copies ")


# --- sizes that depend on the data -----------------------------------------------------------------------------------


def test_a_vocabulary_that_the_tokenizer_decides_is_read_from_it(room, text, cache, tmp_path):
    room(1000)
    experiment = make()
    experiment.model.vocab_size = AUTO
    experiment.tokenizer = ByteBPE(vocab_size=400)
    assert "the run needs about" in refusal(experiment)
    assert experiment.model.vocab_size == AUTO  # The preparation of the data sets it.
    experiment.tokenizer = ByteBPE(path=str(tmp_path / "none"))
    check = MemoryCheck()
    check.resolve_fields(experiment)  # The preparation reports the missing file.
    experiment.model.vocab_size = 512
    with pytest.raises(UserError, match="the run needs about"):
        check.rows(SimpleNamespace(experiment=experiment))


# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_is_refused_before_its_data_is_prepared(room, text, tmp_path, capfd):
    experiment = make(rows=8)
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(tmp_path / "cache")
    room(1000)
    with pytest.raises(UserError, match="the run needs about"):
        train(experiment, str(tmp_path / "run"), callbacks=[MemoryCheck()])
    assert not (tmp_path / "cache").exists() and not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_a_run_that_may_not_fit_starts_with_a_warning(room, text, tmp_path, capfd):
    experiment = make(rows=8)
    experiment.data.source, experiment.data.cache_dir = TextFiles(path=str(text)), str(tmp_path / "cache")
    room(1000)
    experiment.train.steps, experiment.evaluate.batches = 1, 1
    assert train(experiment, str(tmp_path / "run"), callbacks=[MemoryCheck(refuses=False)]) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert re.search(r"memory [\d.]+ MB of 1.00 kB per device \(estimate\)", said) and "TOO LITTLE MEMORY" in said


@pytest.mark.slow
def test_the_largest_config_is_refused_by_the_command(tmp_path):
    done = runs.run(
        [runs.sys.executable, "-m", "pretrainax.main", "--config=llama:3_8b", f"--workdir={tmp_path / 'run'}"]
    )
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and line.startswith("pretrainax: the run needs about ")
    assert not (tmp_path / "run" / "config.json").exists()
