"""Tests the output of the scripts in launch/, and a run that local.py restarts."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.support.runs import FAST, ROOT

LAUNCH = ROOT / "launch"
RUN = ["--config=configs/quickstart.py", "--workdir=/shared/runs/a b"]


def run(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(args, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", sorted(p for p in LAUNCH.iterdir() if p.suffix in (".sh", ".sbatch")), ids=str)
def test_a_script_is_valid_bash(script):
    assert run("bash", "-n", str(script)).stderr == ""


def test_local_prints_a_command_for_each_process():
    said = run(sys.executable, "launch/local.py", "--processes=2", "--devices=4", "--dry-run", "--", *RUN).stdout
    lines = [shlex.split(line) for line in said.splitlines()]
    assert [f"JAX_PROCESS_ID={i}" in line for i, line in enumerate(lines)] == [True, True]
    assert all(line[-2:] == RUN and "JAX_NUM_PROCESSES=2" in line for line in lines)
    assert "--xla_force_host_platform_device_count=4" in said


def test_slurm_prints_one_srun_with_a_process_for_each_gpu():
    said = run("bash", "launch/slurm.sbatch", "--dry-run", *RUN).stdout.splitlines()
    assert "JAX_COORDINATOR_ADDRESS=FIRST_NODE:" in said[0] and "JAX_NUM_PROCESSES=NODES*GPUS" in said[0]
    command = shlex.split(said[1])
    assert command[0] == "srun" and command[-2:] == RUN and "--ntasks-per-node=GPUS" in command
    assert "JAX_PROCESS_ID=$SLURM_PROCID JAX_LOCAL_DEVICE_IDS=$SLURM_LOCALID" in said[1].replace("\\", "")


def test_slurm_numbers_the_processes_of_all_nodes_and_gives_each_its_gpu(tmp_path):
    """The stub of srun runs its command locally, once for each task."""
    stubs = {
        "scontrol": "echo node1",
        "srun": "while [[ $1 != bash ]]; do shift; done\n"
        'for i in 0 1 2 3; do SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) "$@"; done',
    }
    stubs[".venv/bin/python"] = 'echo "$JAX_PROCESS_ID of $JAX_NUM_PROCESSES: $JAX_LOCAL_DEVICE_IDS, $JAX_ENABLE_PGLE"'
    for name, text in stubs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS_PER_NODE": "2"}
    slurm |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path)}
    slurm["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    out = run("bash", "launch/slurm.sbatch", *RUN, **slurm)
    assert out.stdout.splitlines() == [f"{i} of 4: {i % 2}, false" for i in range(4)], out.stderr
    out = run("bash", "launch/slurm.sbatch", *RUN, **slurm | {"SLURM_NTASKS_PER_NODE": "1"})
    assert out.returncode == 2 and "one process for each, set --ntasks-per-node=2" in out.stderr


@pytest.mark.parametrize(
    "given, used",
    [
        ({}, ["XLA_CLIENT_MEM_FRACTION=0.92"]),
        ({"XLA_CLIENT_MEM_FRACTION": "0.8"}, ["XLA_CLIENT_MEM_FRACTION=0.8"]),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}, ["XLA_PYTHON_CLIENT_MEM_FRACTION=0.8"]),  # JAX refuses both names
    ],
)
def test_slurm_sets_the_memory_of_a_gpu_by_one_of_jaxs_two_names(given, used, tmp_path, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {"scontrol": "echo node1", "srun": "env", ".venv/bin/python": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "1", "SLURM_NTASKS_PER_NODE": "1"}
    slurm |= {"SLURM_JOB_NODELIST": "node1", "SLURM_SUBMIT_DIR": str(tmp_path), **given}
    out = run("bash", "launch/slurm.sbatch", *RUN, **slurm, PATH=f"{tmp_path}:{os.environ['PATH']}").stdout
    assert [line for line in out.splitlines() if "MEM_FRACTION" in line] == used


@pytest.mark.parametrize(
    "code, state, restarts, requeues",
    [(75, "RUNNING", 0, 1), (1, "RUNNING", 9, 1), (75, "CANCELLED", 0, 0), (75, "COMPLETING", 0, 0), (75, "", 0, 1)]
    + [(2, "RUNNING", 0, 0), (0, "RUNNING", 0, 0), (1, "RUNNING", 10, 0)],
)
def test_slurm_requeues_what_may_end_otherwise_and_nothing_that_scancel_stopped(
    code, state, restarts, requeues, tmp_path
):
    stubs = {"scontrol": "echo $1", "srun": f"exit {code}", "squeue": f"echo {state}", ".venv/bin/python": ""}
    for name, text in stubs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS_PER_NODE": "2"}
    slurm |= {"SLURM_JOB_NODELIST": "node1", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_RESTART_COUNT": str(restarts)}
    out = run("bash", "launch/slurm.sbatch", *RUN, **slurm, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert out.returncode == code and out.stdout.splitlines().count("requeue") == requeues, out.stderr


def test_slurm_does_not_requeue_a_job_in_a_folder_without_the_environment(tmp_path):
    for name in ("scontrol", "srun"):
        (tmp_path / name).write_text("#!/usr/bin/env bash\necho $1\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_NTASKS_PER_NODE": "2"}
    slurm |= {"SLURM_JOB_NODELIST": "node1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    out = run("bash", "launch/slurm.sbatch", *RUN, **slurm, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (out.returncode, out.stdout) == (2, "") and f"{tmp_path} has no .venv/bin/python" in out.stderr


def test_slurm_is_not_run_without_sbatch():
    out = run("bash", "launch/slurm.sbatch", *RUN, SLURM_JOB_ID="")
    assert out.returncode == 2 and "sbatch" in out.stderr


def test_a_tpu_vm_restarts_on_all_workers():
    said = run("launch/tpu_vm.sh", "--name=a", "--zone=b", "--restarts=4", "--dry-run", "--", *RUN).stdout
    assert said.count("--worker=all") == 3
    assert "of 4" in said and "seq 0 4" in said


@pytest.mark.parametrize("code, starts", [(0, 1), (2, 1), (1, 3), (75, 3)])
def test_a_tpu_vm_starts_again_what_may_end_otherwise(code, starts, tmp_path):
    """The stub of gcloud runs its command locally, as on a worker."""
    stubs = {"gcloud": 'for a; do case $a in --command=*) cd "$HOME"; bash -c "${a#*=}";; esac; done'}
    stubs |= dict.fromkeys(("tar", "sleep", "python3"), ":")
    stubs |= {"uv": '[[ $2 != find ]] || echo "python$3"', "make": 'echo "make $2"'}
    stubs["pretrainax/.venv/bin/python"] = f'echo "start $3"; exit {code}'
    for name, text in stubs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    flags = ["--name=a", "--zone=b", "--restarts=2", "--", *RUN]
    out = run("launch/tpu_vm.sh", *flags, HOME=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert out.returncode == code and out.stdout.count("start --config=configs/quickstart.py") == starts
    assert out.stdout.count("of 2\n") == starts - 1
    assert "make PYTHON=python3.12\n" in out.stdout  # the images have 3.10


def test_a_tpu_vm_receives_the_package_without_environments_and_the_users_runs(tmp_path):
    files = ["launch/tpu_vm.sh", "pretrainax/runs/train.py", ".gitignore"]
    for name in [
        *files,
        "runs/a/config.json",
        ".git/HEAD",
        ".venv/pyvenv.cfg",
        ".venv-3.13/pyvenv.cfg",
        ".pytest_cache/x",
    ]:
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_bytes((LAUNCH / "tpu_vm.sh").read_bytes())
    (tmp_path / "gcloud").write_text('#!/usr/bin/env bash\n[[ $4 == ssh ]] || tar -tzf "$5" | grep -v /$\n')
    (tmp_path / "gcloud").chmod(0o755)
    script = ["bash", str(tmp_path / "here/launch/tpu_vm.sh"), "--name=a", "--zone=b", "--", *RUN]
    assert sorted(run(*script, PATH=f"{tmp_path}:{os.environ['PATH']}").stdout.split()) == sorted(files)


BUCKET = [RUN[0], "--workdir=gs://mine/runs/t5", "--config.data.cache_dir=gs://mine/cache"]


@pytest.mark.parametrize("script", sorted(p for p in LAUNCH.iterdir() if p.suffix in (".sh", ".sbatch")), ids=str)
def test_no_script_writes_under_a_fixed_name_where_others_can_write(script):
    """Other users could create a link with this name first."""
    assert "/tmp/" not in script.read_text()


def test_a_tpu_vm_takes_a_bucket_and_installs_its_library():
    said = run("launch/tpu_vm.sh", "--name=a", "--zone=b", "--dry-run", "--", *BUCKET).stdout
    words = said.replace("\\", "")
    assert "EXTRAS=tpu,metrics,tfds,gcs" in words and all(word in words for word in BUCKET)
    assert "gcs" not in run("launch/tpu_vm.sh", "--name=a", "--zone=b", "--dry-run", "--", *RUN).stdout


def test_slurm_takes_a_bucket():
    said = run("bash", "launch/slurm.sbatch", "--dry-run", *BUCKET).stdout.splitlines()
    assert shlex.split(said[1])[-3:] == BUCKET


def test_a_run_that_could_not_resume_is_not_started():
    out = run("launch/tpu_vm.sh", "--name=a", "--zone=b", "--", RUN[0])
    assert out.returncode == 2 and "--workdir=" in out.stderr


GKE = {
    **{"NAME": "t5", "IMAGE": "registry/pretrainax", "ACCELERATOR": "tpu-v5-lite-podslice", "TOPOLOGY": "4x4"},
    **{"HOSTS": "4", "CHIPS_PER_HOST": "4", "CLAIM": "filestore"},
}


def test_gke_prints_a_job_set_with_every_placeholder_filled():
    yaml = pytest.importorskip("yaml")
    source = "--config.data.source=TextFiles(path='my books')"
    said = run("launch/gke.sh", "--dry-run", "--", *RUN, source, **GKE, SLICES="2").stdout
    (job,) = (job_set := yaml.safe_load(said))["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert job_set["metadata"]["name"] == "t5" and job["replicas"] == 2
    assert job["template"]["spec"]["completions"] == 4
    assert pod["containers"][0]["args"] == [*RUN, source]
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}

    assert pod["volumes"] == [{"name": "files", "persistentVolumeClaim": {"claimName": "filestore"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "files", "mountPath": "/shared"}]


def test_gke_takes_a_bucket_of_which_nodes_keep_their_part():
    yaml = pytest.importorskip("yaml")
    said = run("launch/gke.sh", "--dry-run", "--", *BUCKET, **GKE | {"CLAIM": ""}).stdout
    assert "${" not in said.partition("apiVersion")[2]
    (job,) = yaml.safe_load(said)["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (main,), (volume,) = pod["containers"], pod["volumes"]
    assert main["args"] == BUCKET and main["env"] == [{"name": "XDG_CACHE_HOME", "value": "/cache"}]
    assert main["volumeMounts"] == [{"name": volume["name"], "mountPath": "/cache"}] and "hostPath" in volume


@pytest.mark.parametrize("other", ["--config.train.steps=1", "--config.data.cache_dir=gs://mine/cache"])
def test_gke_refuses_a_workdir_that_pods_lose(other):
    out = run("launch/gke.sh", "--dry-run", "--", RUN[0], "--workdir=runs/a", other, **GKE)
    assert out.returncode == 2 and "--workdir=gs://... or /shared/" in out.stderr


def test_gke_refuses_what_is_not_set():
    out = run("launch/gke.sh", "--dry-run", "--", *RUN, **GKE | {"IMAGE": "", "CLAIM": ""})
    assert out.returncode == 2 and "not set: IMAGE CLAIM;" in out.stderr


@pytest.mark.slow
def test_local_starts_a_run_again_that_ends_like_one_never_killed(tmp_path, text, cache):
    """The undisturbed run has the same numbers of processes and devices, so its metrics are equal to the last bit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    env = os.environ | {"XLA_FLAGS": FAST}
    out = subprocess.run(local(whole, text, cache), cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert out.returncode == 0, out.stdout[-3000:]

    launcher = subprocess.Popen(
        local(killed, text, cache, "--restarts=1"),
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(killed / "checkpoints" / "5", launcher)
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    environment = pathlib.Path(f"/proc/{children[0]}/environ").read_text().split("\0")
    (port,) = (int(line.rpartition(":")[2]) for line in environment if line.startswith("JAX_COORDINATOR_ADDRESS="))
    (address,) = listening(port)
    assert address in ("0100007F", "0000000000000000FFFF00000100007F")  # 127.0.0.1, and its form in IPv6
    # The other process notices the loss of process 0 at once, but the loss of any other process only after 20 s.
    os.kill(int(children[0]), signal.SIGKILL)
    said, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, said[-3000:]
    assert "[1] pretrainax: process 0 of 2 (the coordinator) is gone" in said
    assert "local.py: process 0 of 2 was ended by SIGKILL" in said
    assert "local.py: restarting" in said
    assert losses(killed) == losses(whole)


def listening(port: int) -> list[str]:
    """Returns the local addresses that listen on a port, in the notation of the kernel."""
    rows = [line.split() for file in ("tcp", "tcp6") for line in open(f"/proc/net/{file}").readlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]


def local(workdir, text, cache, *flags: str) -> list[str]:
    fields = ["train.steps=12", "evaluate.every=6", "evaluate.batches=1", "checkpoint.every=5", "mesh.fsdp=2"]
    fields += [f"data.source.path={text}", f"data.cache_dir={cache}"]
    return [
        *(sys.executable, "launch/local.py", "--processes=2", "--devices=2", *flags, "--"),
        *("--config=tests/support/tiny.py:gpt", f"--workdir={workdir}", *(f"--config.{field}" for field in fields)),
    ]


def wait_for(path: pathlib.Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def losses(workdir: pathlib.Path) -> list[tuple]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["split"], line["loss"]) for line in lines]


# Replaces pretrainax.main: it prints its folder, and records the signal that ended it.
STUB = """
import os, pathlib, signal, sys, time

me = pathlib.Path(os.environ["STOPPED"], os.environ["JAX_PROCESS_ID"])


def stop(number, frame):
    me.write_text(signal.Signals(number).name)
    sys.exit(75)


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, stop)
print("stands in", os.getcwd(), flush=True)
for i in range(5000 if "--talk" in sys.argv else 0):
    print(i, flush=True)
while "--talk" not in sys.argv:
    time.sleep(0.02)
"""


@pytest.fixture
def stubs(tmp_path):
    """Starts local.py in a separate folder, with bash and $LOCAL; `ends` records which signal ended each child."""
    (tmp_path / "pretrainax").mkdir()
    (tmp_path / "pretrainax" / "__init__.py").touch()
    (tmp_path / "pretrainax" / "main.py").write_text(STUB)
    (tmp_path / "ends").mkdir()
    # Under nohup, the children of the test would ignore SIGHUP.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    started = []

    def start(shell: str, *arguments: str) -> subprocess.Popen:
        launcher = [sys.executable, str(LAUNCH / "local.py"), "--processes=2", "--", "--config=c", "--workdir=w"]
        env = os.environ | {"LOCAL": shlex.join([*launcher, *arguments]), "STOPPED": str(tmp_path / "ends")}
        process = subprocess.Popen(
            ["bash", "-c", shell], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    signal.signal(signal.SIGHUP, before)


def ends(folder: pathlib.Path) -> list[str]:
    """Waits until all children have ended, and returns the signal that ended each child."""
    deadline = time.monotonic() + 30
    while len(os.listdir(folder)) < 2 or not all(path.read_text() for path in folder.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [path.read_text() for path in sorted(folder.iterdir())]


def test_local_starts_its_processes_where_the_user_stands(stubs, tmp_path):
    process = stubs("exec $LOCAL")
    lines = sorted(process.stdout.readline() for _ in range(2))
    assert lines == [f"[{i}] stands in {tmp_path}\n" for i in range(2)]


@pytest.mark.parametrize(
    "number, passed", [(signal.SIGHUP, "SIGHUP"), (signal.SIGTERM, "SIGTERM"), (signal.SIGKILL, "SIGTERM")]
)
def test_local_takes_its_processes_along(number, passed, stubs, tmp_path):
    process = stubs("exec $LOCAL")
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(number)
    assert ends(tmp_path / "ends") == [passed] * 2
    assert process.wait(timeout=30) == (-number if number == signal.SIGKILL else 75)


def test_local_under_nohup_does_not_hear_that_the_terminal_is_closed(stubs, tmp_path):
    process = stubs("exec nohup $LOCAL")
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert ends(tmp_path / "ends") == ["SIGTERM"] * 2


@pytest.mark.parametrize("shell", ["$LOCAL | head -1; exit ${PIPESTATUS[0]}", "$LOCAL >&-", "$LOCAL <&- >&- 2>&-"])
def test_local_goes_on_when_nobody_reads_it(shell, stubs):
    process = stubs(shell, "--talk")
    process.communicate(timeout=60)
    assert process.returncode == 0
