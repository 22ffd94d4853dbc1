"""Runs each program of a comparison in a separate process, with equal threads, one process at a time."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any


class Side:
    """A process that runs the same script with `--serve` and answers requests."""

    def __init__(self, script: str, words: list[str], env: Mapping[str, str]):
        """Starts `script`.

        Args:
          words: arguments after `--serve`.
          env: variables in addition to the variables of this process.
        """
        env = os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} | env
        env |= {"XLA_CLIENT_MEM_FRACTION": "0.4", "XLA_PYTHON_CLIENT_MEM_FRACTION": ""}  # JAX refuses both names
        command = [sys.executable, script, "--serve", *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, *numbers: int) -> Any:
        """Sends one request and returns the decoded JSON response."""
        print(*numbers, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.process.args)} ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Closes stdin, which ends the process, and waits for the end."""
        self.process.stdin.close()
        self.process.wait(timeout=60)


def serve(run: Callable[..., Any]) -> None:
    """Calls `run` with the numbers of each line of stdin and prints the result as JSON; `run` prints to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(run(*map(int, line.split()))), file=answers, flush=True)
