"""Tests runs under jumping clocks, without network or home directory, and as another user: results must not change.

    python -m tests.chaos.surroundings [--config=tests/support/tiny.py:gpt]

The trials without network use a network namespace without an interface. The trials as another user use a user namespace
in which the user is nobody, without capabilities (`unshare`). A changed dataset must end a run that resumes.
"""

import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Optional

from tests.support import runs

# Runs a command under clocks that jump by years, forwards and backwards, at every call. Orbax is excluded: its timeouts
# use this clock, and a jump by five minutes during a save ends a run, with one line.
JUMPING = """
import random, runpy, sys, time

real, years = time.time, 86400 * 365


def jumping():
    looks = sys._getframe(1).f_globals.get("__name__", "")
    return real() + (0 if looks.startswith("orbax") else random.uniform(-30, 30) * years)


time.time = jumping
time.time_ns = lambda: int(jumping() * 1e9)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Surroundings:
    def __init__(self, whole: runs.Whole, folder: pathlib.Path):
        self.whole, self.folder = whole, folder

    def training(self, name: str, text: Optional[pathlib.Path] = None, *flags: str) -> list[str]:
        """Returns a command that starts from the text, in a separate cache."""
        cache = self.folder / f"cache-{name}"
        return runs.command(self.whole.config, self.folder / name, text or self.whole.text, cache, runs.SAVING, *flags)

    def is_the_same(self, name: str, args: list[str], env=None) -> None:
        self.whole.ends_the_same(self.folder / name, args, env)
        assert runs.files(self.folder / f"cache-{name}" / "corpora") == runs.files(self.whole.cache / "corpora")

    def clocks_that_jump(self) -> None:
        program, _, module, *flags = self.training("clock")
        self.is_the_same("clock", [program, "-c", JUMPING, module, *flags])

    def no_network(self) -> None:
        self.is_the_same("alone", [*self._unshare("--net"), *self.training("alone")])

    def no_home(self) -> None:
        env = {name: value for name, value in runs.ENV.items() if name not in ("HOME", "XDG_CACHE_HOME")}
        self.is_the_same("homeless", self.training("homeless"), env)

    def a_home_that_cannot_be_written(self) -> None:
        self.is_the_same("unwritable", self.training("unwritable"), runs.ENV | {"HOME": "/proc/none"})

    def a_cache_that_cannot_be_written(self) -> None:
        """Uses the default cache, ~/.cache/pretrainax, in an unwritable home; the error must name the field to set."""
        args = [flag for flag in self.training("cacheless") if "cache_dir" not in flag]
        failed = runs.run(args, runs.ENV | {"HOME": "/proc/none"})
        assert failed.returncode == 2 and "set config.data.cache_dir" in runs.last_line(failed), failed.stderr

    def not_root(self) -> None:
        self.is_the_same("nobody", [*self._unshare("--user"), *self.training("nobody")])

    def root(self) -> None:
        self.is_the_same("root", [*self._unshare("--user", "--map-root-user"), *self.training("root")])

    def all_at_once(self) -> None:
        program, _, module, *flags = self.training("all")
        args = [*self._unshare("--user", "--net"), program, "-c", JUMPING, module, *flags]
        self.is_the_same("all", args, runs.ENV | {"HOME": "/proc/none"})

    def another_text_under_a_run_that_resumes(self) -> None:
        """Changes the text, with a trained and a given tokenizer; the run must fail and leave checkpoints unchanged."""
        saved = f"--config.tokenizer.path={self.whole.run / 'tokenizer'}"
        for name, flags in (("learnt", ()), ("given", (saved,))):
            text = runs.write_text(self.folder / f"text-{name}")
            args = self.training(name, text, *flags)
            self._interrupt(args, self.folder / name)
            before, good = runs.files(self.folder / name), (text / "0.txt").read_bytes()
            (text / "0.txt").write_bytes(good.replace(b"a", b"o", 1))
            failed = runs.run(args)
            line = runs.last_line(failed)
            assert failed.returncode == 2 and ("tokenizer" in line or "the text of config.data.source" in line), line
            after = runs.files(self.folder / name)
            kept = [path for path in before if path.startswith(("checkpoints", "tokenizer", "config"))]
            assert [after[path] for path in kept] == [before[path] for path in kept]
            (text / "0.txt").write_bytes(good)
            done = runs.run(args)
            assert done.returncode == 0, done.stderr

    def another_text_under_a_run_that_trains(self) -> None:
        """Deletes the text during training; the run must use its prepared tokens and end normally."""
        text, workdir = runs.write_text(self.folder / "text-under"), self.folder / "under"
        process = runs.start(self.training("under", text))
        while process.poll() is None and not (workdir / "metrics.jsonl").exists():
            time.sleep(0.005)
        shutil.rmtree(text)
        assert process.wait() == 0
        runs.assert_same_run(workdir, self.whole.run)

    def _interrupt(self, args: list[str], workdir: pathlib.Path) -> None:
        process = runs.start(args)
        while process.poll() is None and not (workdir / "checkpoints" / "4").exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 75

    def _unshare(self, *kinds: str) -> list[str]:
        command = ["unshare", *kinds]
        for more in ([], ["--user", "--map-root-user"]):  # users other than root need a user namespace too
            if (
                shutil.which("unshare")
                and subprocess.run([*command, *more, "true"], capture_output=True).returncode == 0
            ):
                return command + more
        raise runs.Skipped(f"this machine does not allow {' '.join(command)}")


TRIALS = (
    *("clocks_that_jump", "no_network", "no_home", "a_home_that_cannot_be_written", "a_cache_that_cannot_be_written"),
    *("not_root", "root", "all_at_once"),
    *("another_text_under_a_run_that_resumes", "another_text_under_a_run_that_trains"),
)


def main() -> int:
    report = runs.Report()
    with runs.trials(__doc__, TRIALS) as (names, whole, folder):
        surroundings = Surroundings(whole, folder)
        for name in names:
            with report.trying(name.replace("_", " ")):
                getattr(surroundings, name)()
    return report.sum_up()


if __name__ == "__main__":
    sys.exit(main())
