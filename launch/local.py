"""Several processes on this machine, each with fake CPU devices: how a run of many hosts is tried without them.

    python launch/local.py --processes=2 --devices=4 [--restarts=3] [--dry-run] -- --config=FILE --workdir=DIR ...

After `--` come the arguments of `python -m pretrainax.main`. The lines of each process begin with its number. When one
ends badly, the others are given 30 s to end by themselves, and then killed. `--restarts=N` starts all of them again, at
most N times, from the newest checkpoint, after an exit code other than 0 and 2 (a mistake in the config stays one);
after 75 as well, unless it was this launcher that was told to stop. SIGTERM and SIGINT are passed on to all processes.
The exit code is that of the run: 0 done, 1 failed, 2 bad config or input, 75 preempted after saving.
"""

import argparse
import contextlib
import ctypes
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATIENCE = 30.0  # seconds for the others to end by themselves
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class Launcher:
    """Starts the processes of a run, and again."""

    def __init__(self, processes: int, devices: int, arguments: list[str]):
        self.processes, self.devices = processes, devices
        self.command = [sys.executable, "-m", "pretrainax.main", *arguments]
        self.children: list[subprocess.Popen] = []
        self.told_to_stop = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
                signal.signal(number, self.pass_on)

    def environment(self, index: int, port: int) -> dict[str, str]:
        """Returns what the process `index` finds beside what this one has."""
        flags = os.environ.get("XLA_FLAGS", "")
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={self.devices}".strip(),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(self.processes),
            "JAX_PROCESS_ID": str(index),
        }

    def run(self, restarts: int) -> int:
        while (code := self.attempt()) not in (0, 2) and restarts and not self.told_to_stop:
            restarts -= 1
            say(f"starting again from the newest checkpoint; {restarts} more restarts after this one")
        return code

    def attempt(self) -> int:
        """Starts all, waits for all, and returns the exit code of the run."""
        port = free_port()
        self.children = [self.start(i, port) for i in range(self.processes)]
        readers = [threading.Thread(target=prefix, args=pair) for pair in enumerate(self.children)]
        for reader in readers:
            reader.start()
        if self.told_to_stop:  # the signal came before they were there
            self.pass_on(signal.SIGTERM)
        first = self.first_end()
        deadline = time.monotonic() + PATIENCE
        for child in self.children:
            try:
                child.wait(max(deadline - time.monotonic(), 0) if first not in (0, 75) else None)
            except subprocess.TimeoutExpired:
                child.kill()
        for reader in readers:
            reader.join()
        return self.verdict()

    def start(self, index: int, port: int) -> subprocess.Popen:
        env = os.environ | self.environment(index, port)
        launcher = os.getpid()
        return subprocess.Popen(
            self.command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: end_with(launcher),
        )

    def first_end(self) -> int:
        """Waits for the first process that ends, rather for one that ends badly; its exit code."""
        while True:
            codes = [child.poll() for child in self.children]
            bad = [code for code in codes if code not in (None, 0, 75)]
            if bad or None not in codes:
                return bad[0] if bad else codes[0]
            time.sleep(0.05)

    def verdict(self) -> int:
        """0 or 75 if all say so; otherwise that of a mistake, or 1."""
        codes = [child.wait() for child in self.children]
        for i, code in enumerate(codes):
            if code < 0:
                say(f"process {i} of {self.processes} was ended by {signal.Signals(-code).name}")
        if len(set(codes)) == 1 and codes[0] >= 0:
            return codes[0]
        return 2 if 2 in codes else 1

    def pass_on(self, number: int, frame: object = None) -> None:
        self.told_to_stop = True
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)


def end_with(launcher: int) -> None:
    """Has this process, a child of the launcher, get SIGTERM when that one dies without passing it on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it has died already
            os._exit(1)


def prefix(index: int, child: subprocess.Popen) -> None:
    """Prints the lines of a child, to the last: it would wait for us to read them."""
    for line in child.stdout:
        if b"[Gloo] Rank" in line:  # it counts its connections
            continue
        write(1, f"[{index}] ".encode() + line)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def say(line: str) -> None:
    write(2, f"local.py: {line}\n".encode())


def write(number: int, line: bytes) -> None:
    """Writes to stdout or stderr; what nobody reads any more (`| head`, a closed terminal) is dropped."""
    with contextlib.suppress(OSError):
        os.write(number, line)


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, arguments = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--devices", type=int, default=1, help="fake devices of each process")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")
    flags = parser.parse_args(own)
    if flags.processes < 1 or flags.devices < 1 or flags.restarts < 0:
        parser.error("--processes and --devices are at least 1, --restarts at least 0")
    if not any(a.startswith("--config=") for a in arguments) or not any(a.startswith("--workdir=") for a in arguments):
        parser.error("after -- come the arguments of pretrainax.main, among them --config= and --workdir=")
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:  # the number of a closed stdout would go to a child's pipe
        pass
    os.close(spare)
    launcher = Launcher(flags.processes, flags.devices, arguments)
    if flags.dry_run:
        for i in range(flags.processes):
            variables = [f"{k}={shlex.quote(v)}" for k, v in launcher.environment(i, 12345).items()]
            print(" ".join([*variables, shlex.join(launcher.command)]))
        return 0
    return launcher.run(flags.restarts)


if __name__ == "__main__":
    sys.exit(main())
