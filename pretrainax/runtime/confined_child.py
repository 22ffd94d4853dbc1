"""Runs in the process of `confined.Confined`: answers calls of one function within its budgets, a line of JSON each.

    python confined_child.py FILE FUNCTION SECONDS BYTES

It imports the standard library alone, and executes FILE without the packages around it.
"""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import sys


def serve(file: str, name: str, seconds: float, size: int) -> None:
    """Reads the arguments of calls from the standard input, and writes what the function returns.

    Args:
      seconds: of one call; at their end the system ends the process, whatever it is doing.
      size: bytes of address space.
    """
    spec = importlib.util.spec_from_file_location("confined", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            answer = {"value": getattr(module, name)(**json.loads(line))}
        except ValueError as e:
            answer = {"error": str(e)}
        except RecursionError:
            answer = {"error": "calls itself deeper than Python allows"}
        except MemoryError:
            answer = {"error": f"took more than {size / 2**30:g} GiB of memory"}
        content = json.dumps(answer).encode() + b"\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(content)
        out.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
