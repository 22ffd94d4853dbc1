"""Simulates a multi-host run on this machine: several processes, each with fake CPU devices.

    python launch/local.py --processes=2 --devices=4 [--restarts=3] [--dry-run] -- --config=FILE --workdir=DIR ...

Give the arguments of `python -m pretrainax.main` after `--`. The lines of each process begin with its number. If one
process fails, the others have 30 s to exit; the launcher then kills them. `--restarts=N` restarts all processes from
the newest checkpoint, at most N times, after an exit status other than 0 and 2 (an invalid config stays invalid).
Status 75 leads to a restart too, unless the launcher itself received a signal. The launcher forwards SIGTERM and SIGINT
to all processes. Its exit status is the run's: 0 done, 1 failed, 2 invalid config or input, 75 preempted after saving.
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
PATIENCE = 30.0  # seconds for the other processes to exit
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class Launcher:
    """Starts and restarts the processes of a run."""

    def __init__(self, processes: int, devices: int, arguments: list[str]):
        self.processes, self.devices = processes, devices
        self.command = [sys.executable, "-m", "pretrainax.main", *arguments]
        self.children: list[subprocess.Popen] = []
        self.stop_requested = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under `nohup`
                signal.signal(number, self.pass_on)

    def environment(self, index: int, port: int) -> dict[str, str]:
        """Returns the environment variables of process `index` that differ from the launcher's."""
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
        while (code := self.attempt()) not in (0, 2) and restarts and not self.stop_requested:
            restarts -= 1
            say(f"restarting from the newest checkpoint; {restarts} more restarts after this one")
        return code

    def attempt(self) -> int:
        """Starts all processes, waits for them, and returns the exit status of the run."""
        port = free_port()
        self.children = [self.start(i, port) for i in range(self.processes)]
        readers = [threading.Thread(target=prefix, args=pair) for pair in enumerate(self.children)]
        for reader in readers:
            reader.start()
        if self.stop_requested:  # the signal came before the processes started
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
        """Waits for the first process that exits and returns its exit status; failures come first."""
        while True:
            codes = [child.poll() for child in self.children]
            bad = [code for code in codes if code not in (None, 0, 75)]
            if bad or None not in codes:
                return bad[0] if bad else codes[0]
            time.sleep(0.05)

    def verdict(self) -> int:
        """Returns the exit status that all processes share; otherwise 2 if one of them has 2, or 1."""
        codes = [child.wait() for child in self.children]
        for i, code in enumerate(codes):
            if code < 0:
                say(f"process {i} of {self.processes} was ended by {signal.Signals(-code).name}")
        if len(set(codes)) == 1 and codes[0] >= 0:
            return codes[0]
        return 2 if 2 in codes else 1

    def pass_on(self, number: int, frame: object = None) -> None:
        self.stop_requested = True
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)


def end_with(launcher: int) -> None:
    """Requests SIGTERM for this child process if the launcher dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it is already dead
            os._exit(1)


def prefix(index: int, child: subprocess.Popen) -> None:
    """Prints all lines of a child; an unread pipe would block the child."""
    for line in child.stdout:
        if b"[Gloo] Rank" in line:  # Gloo logs its connections
            continue
        write(1, f"[{index}] ".encode() + line)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def say(line: str) -> None:
    write(2, f"local.py: {line}\n".encode())


def write(number: int, line: bytes) -> None:
    """Writes to stdout or stderr; ignores a closed pipe or terminal (`| head`)."""
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
        parser.error("--processes and --devices must be at least 1, --restarts at least 0")
    if not any(a.startswith("--config=") for a in arguments) or not any(a.startswith("--workdir=") for a in arguments):
        parser.error("give the arguments of pretrainax.main after --, with --config= and --workdir=")
    while (
        spare := os.open(os.devnull, os.O_RDWR)
    ) <= 2:  # otherwise a child's pipe could get the descriptor of a closed stdout
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
