"""Converts the errors of failed saves (disk, Orbax, TensorStore) to one-line errors."""

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator

from orbax.checkpoint._src.serialization import tensorstore_utils

from pretrainax.config import RunFailed


@contextlib.contextmanager
def save_errors(step: int) -> Iterator[None]:
    """Converts errors raised while saving `step` (disk, permissions, Orbax, TensorStore) to RunFailed.

    The message is one line; the flag `--debug` shows the original error.
    """
    try:
        yield
    except Exception as error:
        raise RunFailed(f"could not save step {step}: {_reason(error)}; earlier checkpoints are kept") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if match := re.search(r"os_error_code='(\d+)'", text):  # format of TensorStore for errno
        return os.strerror(int(match[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {text[:200]}"


def silence_orbax() -> None:
    """Silences Orbax's log of sizes, and the tracebacks that Orbax logs in addition to raising a save's error."""
    for name in ("absl", "concurrent.futures"):
        logging.getLogger(name).addFilter(_is_not_orbax_traceback)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    # Before and after each save, Orbax reads TensorStore's metrics for one log line. In TensorStore 0.1.86 each read
    # leaks memory, 0.06 MB per save.
    if hasattr(tensorstore_utils, "get_tensorstore_raw_bytes"):
        tensorstore_utils.get_tensorstore_raw_bytes = lambda *_, **__: 0


def _is_not_orbax_traceback(record: logging.LogRecord) -> bool:
    """Returns False for tracebacks of Orbax threads that fail or finish late: the save itself raises their errors."""
    return "_SignalingThread.run() raised" not in str(record.msg) and "loop is closed" not in str(record.exc_info)
