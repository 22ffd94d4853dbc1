"""Tests the memory that a process may use, which its machine and control groups limit, and models that exceed it."""

import jax
import pytest

from pretrainax.config import UserError
from pretrainax.inference.load import load
from pretrainax.sharding import device_memory
from pretrainax.sharding.device_memory import available_memory
from tests.golden import CASES
from tests.support.huggingface_weights import write_directory, write_run

GIB = 2**30


def machine(root, files):
    """Creates a file system with these files."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return str(root)


MEMINFO = {"proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable:   8388608 kB\n"}


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 8 * GIB),  # no control groups
        # Version 2: the limit of a parent counts too, and the value of a child without a limit is "max".
        (
            {
                "proc/self/cgroup": "0::/slurm/job/step\n",
                "sys/fs/cgroup/slurm/job/memory.max": 4 * GIB,
                "sys/fs/cgroup/slurm/job/memory.current": 3 * GIB,
                "sys/fs/cgroup/slurm/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
                "sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
                "sys/fs/cgroup/slurm/job/step/memory.current": 3 * GIB,
            },
            2 * GIB,  # The terms are 4 - 3, and 1 for cached files.
        ),
        # A container sees its own group as the root, under its path on the host.
        (
            {
                "proc/self/cgroup": "0::/../../docker/abc\n",
                "sys/fs/cgroup/memory.max": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{GIB}\n",
            },
            2 * GIB,
        ),
        # Version 1, with an additional controller without memory limits.
        (
            {
                "proc/self/cgroup": "9:cpu,cpuacct:/a\n4:memory:/job:1\n0::/\n",
                "sys/fs/cgroup/memory/job:1/memory.limit_in_bytes": 2 * GIB,
                "sys/fs/cgroup/memory/job:1/memory.usage_in_bytes": GIB,
                "sys/fs/cgroup/memory/job:1/memory.stat": f"total_inactive_file {GIB // 2}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GIB,
            },
            3 * GIB // 2,
        ),
        # The usage exceeds the limit, for example after the limit was lowered.
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": GIB,
                "sys/fs/cgroup/memory.current": 2 * GIB,
            },
            0,
        ),
        # Files without numbers are ignored.
        (
            {
                "proc/self/cgroup": "nothing\n0::/\n",
                "sys/fs/cgroup/memory.max": "much",
                "sys/fs/cgroup/memory.current": "",
                "sys/fs/cgroup/memory.stat": "a b c\n",
            },
            8 * GIB,
        ),
    ],
    ids=["none", "v2", "container", "v1", "exceeded", "broken"],
)
def test_the_least_of_the_machine_and_its_control_groups_is_available(files, expected, tmp_path):
    assert available_memory(machine(tmp_path, MEMINFO | files)) == expected


def test_without_proc_the_size_of_the_machine_counts(tmp_path):
    assert available_memory(str(tmp_path)) > GIB / 4


def test_cpu_devices_share_what_the_machine_has(monkeypatch):
    monkeypatch.setattr(device_memory, "available_memory", lambda: 10**10)
    share = (10**10 - 4 * 10**8) // jax.local_device_count()
    assert device_memory.device_memory() == share
    monkeypatch.setattr(device_memory, "available_memory", lambda: 10**8)  # less than the runtime needs
    assert device_memory.device_memory() == 0
    monkeypatch.setattr(device_memory, "available_memory", lambda: None)
    assert device_memory.device_memory() is None


@pytest.mark.parametrize("write", [write_run, write_directory], ids=["run", "directory"])
def test_a_model_whose_parameters_do_not_fit_is_refused_in_one_line(write, tmp_path, monkeypatch):
    folder = write(tmp_path / "it", CASES["gpt2"].config) if write is write_run else write(tmp_path / "it", "gpt2")
    size = sum(x.size * 4 for x in jax.tree.leaves(load(str(folder)).params))
    for memory in (size, None):  # The memory is exactly enough, or unknown.
        monkeypatch.setattr(device_memory, "device_memory", lambda memory=memory: memory)
        load(str(folder))
    monkeypatch.setattr(device_memory, "device_memory", lambda: size - 1)
    with pytest.raises(
        UserError, match=r"it.*: the parameters need .*B of memory per device, but a cpu has .*B: use a"
    ):
        load(str(folder))
