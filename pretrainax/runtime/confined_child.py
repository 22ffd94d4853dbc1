"""Runs as the child process of `confined.Confined`: reads calls of one function as JSON lines, and writes the results.

    python confined_child.py FILE FUNCTION SECONDS BYTES

SECONDS and BYTES are the limits on time and memory. This file imports only the standard library, and executes FILE
without importing the packages that contain it.
"""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import sys


def serve(file: str, name: str, seconds: float, size: int) -> None:
    """Reads the arguments of each call from standard input, and writes the result of each call to standard output.

    Args:
      seconds: time limit of one call. At the limit, the system kills the process, even inside a library.
      size: limit on the address space, in bytes.
    """
    spec = importlib.util.spec_from_file_location("confined", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that output of a library does not mix with the results
    with contextlib.suppress(ValueError, OSError):  # macOS does not support this limit
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            result = {"value": getattr(module, name)(**json.loads(line))}
        except ValueError as e:
            result = {"error": str(e)}
        except RecursionError:
            result = {"error": "calls itself deeper than Python allows"}
        except MemoryError:
            result = {"error": f"took more than {size / 2**30:g} GiB of memory"}
        content = json.dumps(result).encode() + b"\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        output.write(content)
        output.flush()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
