"""Tests runs on a full, read-only or slow disk: they must print a clear error, and older checkpoints must stay valid.

    python -m tests.chaos.disk [--config=tests/support/tiny.py:gpt]

The disk is real: a tmpfs of a few megabytes, and a bind mount that becomes read-only, in a separate mount namespace
(`unshare --mount`, for which users other than root need user namespaces). For the slow disk, strace delays every fsync
and fdatasync. Trials that a machine does not allow are skipped, with a message.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from tests.support import runs


def in_namespace(module: str, arguments: list[str]) -> int:
    """Runs the module in a new mount namespace."""
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        print("skip  all: this machine does not allow mounts (unshare --mount)")
        return 0
    return subprocess.run([*unshare, sys.executable, "-m", module, "--inside", *arguments], cwd=runs.ROOT).returncode


def mount(*arguments) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


def small_disk(path: pathlib.Path, size: int) -> pathlib.Path:
    path.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)
    return path


class Disk:
    def __init__(self, whole: runs.Whole, folder: pathlib.Path):
        self.whole, self.folder = whole, folder
        newest = whole.run / "checkpoints" / str(runs.steps(whole.run)[-1])
        self.step_bytes = sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())

    def training(self, workdir: str) -> list[str]:
        return self.whole.training(self.folder / workdir)

    def resumes(self, workdir: str) -> None:
        """Checks that the same command ends like an undisturbed run after the disk is repaired."""
        self.whole.ends_the_same(self.folder / workdir)

    def full_at_a_save(self) -> None:
        """Fills a disk with room for 2.5 checkpoints; the config keeps the newest two and the best."""
        disk = small_disk(self.folder / "full" / "checkpoints", int(2.5 * self.step_bytes))
        failed = runs.run(self.training("full"))
        assert failed.returncode == 1, failed.stderr
        line = runs.last_line(failed)
        assert "could not save step" in line and "No space left on device" in line, line
        kept = runs.steps(self.folder / "full")
        assert kept and runs.valid_steps(self.folder / "full") == kept, kept
        mount("-o", f"remount,size={20 * self.step_bytes}", disk)
        self.resumes("full")

    def full_everywhere(self) -> None:
        """Fills the disk that also has the metrics, the events and the plot."""
        disk = small_disk(self.folder / "all", int(2.5 * self.step_bytes))
        failed = runs.run(self.training("all"))
        assert failed.returncode in (1, 2), failed.stderr
        assert "No space left" in runs.last_line(failed), failed.stderr
        assert runs.valid_steps(self.folder / "all") == runs.steps(self.folder / "all")
        mount("-o", f"remount,size={20 * self.step_bytes}", disk)
        self.resumes("all")

    def full_before_the_start(self) -> None:
        disk = small_disk(self.folder / "none", 64 << 10)
        (disk / "ballast").write_bytes(bytes(60 << 10))
        failed = runs.run(self.training("none"))
        assert failed.returncode in (1, 2), failed.stderr
        assert "No space left" in runs.last_line(failed), failed.stderr

    def full_cache(self) -> None:
        disk = small_disk(self.folder / "little", 128 << 10)
        failed = runs.run(runs.preparing(self.whole.config, self.whole.text, disk))
        assert failed.returncode == 2, failed.stderr
        assert "no space left in" in runs.last_line(failed), failed.stderr
        mount("-o", "remount,size=100m", disk)
        done = runs.run(runs.preparing(self.whole.config, self.whole.text, disk))
        assert done.returncode == 0, done.stderr
        assert runs.files(disk / "corpora") == runs.files(self.whole.cache / "corpora")

    def full_at_an_export(self) -> None:
        disk = small_disk(self.folder / "exports", self.step_bytes // 8)
        failed = runs.run(runs.exporting(self.whole.run, disk / "export"))
        assert failed.returncode == 1, failed.stderr
        assert "No space left" in runs.last_line(failed), failed.stderr
        assert not (disk / "export").exists()

    def read_only_from_the_start(self) -> None:
        folder = self.folder / "read_only"
        folder.mkdir()
        mount("--bind", folder, folder)
        mount("-o", "remount,bind,ro", folder)
        failed = runs.run(self.training("read_only"))
        assert failed.returncode in (1, 2), failed.stderr
        assert "Read-only file system" in runs.last_line(failed), failed.stderr

    def read_only_in_the_middle(self) -> None:
        checkpoints = self.folder / "turns" / "checkpoints"
        checkpoints.mkdir(parents=True)
        mount("--bind", checkpoints, checkpoints)
        process = subprocess.Popen(
            self.training("turns"),
            cwd=runs.ROOT,
            env=runs.ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while process.poll() is None and not (checkpoints / "4").exists():
            time.sleep(0.002)
        while process.poll() is None:  # the mount is busy while a file is open for writing
            done = subprocess.run(["mount", "-o", "remount,bind,ro", str(checkpoints)], capture_output=True)
            if done.returncode == 0:
                break
        out, err = process.communicate()
        failed = subprocess.CompletedProcess([], process.returncode, out, err)
        assert failed.returncode == 1, err
        line = runs.last_line(failed)
        assert "could not save step" in line and "Read-only file system" in line, line
        mount("-o", "remount,bind,rw", checkpoints)
        self.resumes("turns")
        assert runs.valid_steps(self.folder / "turns") == runs.steps(self.folder / "turns")

    def slow(self) -> None:
        """Delays each save beyond the next save; the run must wait for each save and for the last one."""
        if shutil.which("strace") is None:
            raise runs.Skipped("strace is not installed")
        delay = "inject=fsync,fdatasync:delay_exit=30000"  # microseconds
        strace = [
            "strace",
            "--follow-forks",
            "--quiet=all",
            "-e",
            "trace=fsync,fdatasync",
            "-e",
            delay,
            "-o",
            "/dev/null",
        ]
        if subprocess.run([*strace, "true"], capture_output=True).returncode:
            raise runs.Skipped("strace cannot trace on this machine")
        self.whole.ends_the_same(self.folder / "slow", [*strace, *self.training("slow")])
        assert runs.valid_steps(self.folder / "slow") == runs.steps(self.folder / "slow")


TRIALS = (
    *("full_at_a_save", "full_everywhere", "full_before_the_start", "full_cache", "full_at_an_export"),
    *("read_only_from_the_start", "read_only_in_the_middle", "slow"),
)


def main() -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--only", default=",".join(TRIALS))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.inside:
        return in_namespace("tests.chaos.disk", sys.argv[1:])
    report = runs.Report()
    with tempfile.TemporaryDirectory(prefix="chaos", ignore_cleanup_errors=True) as scratch:
        whole = runs.Whole(given.config, pathlib.Path(given.whole or f"{scratch}/whole"))
        disk = Disk(whole, pathlib.Path(scratch))
        for name in given.only.split(","):
            with report.trying(name.replace("_", " ")):
                getattr(disk, name)()
        for line in reversed(open("/proc/self/mounts").read().splitlines()):
            if line.split()[1].startswith(scratch):
                subprocess.run(["umount", "--lazy", line.split()[1]], capture_output=True)
    return report.sum_up()


if __name__ == "__main__":
    sys.exit(main())
