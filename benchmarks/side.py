"""Runs each side of a comparison in a process of its own, with the same threads, and only when it is its turn."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any


class Side:
    """A process that a script starts of itself, with `--serve`, and asks."""

    def __init__(self, script: str, words: list[str], env: Mapping[str, str]):
        """Starts `script` with these words; env: on top of this process's."""
        env = os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} | env
        env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}
        command = [sys.executable, script, "--serve", *words]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, *numbers: int) -> Any:
        """Returns what the side answers to numbers."""
        print(*numbers, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.process.args)} ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Lets the process end."""
        self.process.stdin.close()
        self.process.wait(timeout=60)


def serve(run: Callable[..., Any]) -> None:
    """Answers with `run` of the numbers in each line of stdin, to its end; what `run` prints goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(run(*map(int, line.split()))), file=answers, flush=True)
