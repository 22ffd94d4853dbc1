"""Errors of Orbax and TensorStore when a save fails, each told in one line."""

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
    """Turns whatever stops a save (disk, permissions, Orbax, TensorStore) into one line; `--debug` shows the cause."""
    try:
        yield
    except Exception as error:
        raise RunFailed(f"could not save step {step}: {_reason(error)}; earlier checkpoints are kept") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if match := re.search(r"os_error_code='(\d+)'", text):  # TensorStore's way of giving errno
        return os.strerror(int(match[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {text[:200]}"


def silence_orbax() -> None:
    """Hides what Orbax logs of a save that fails beside the error itself, and the sizes that it logs of each."""
    for name in ("absl", "concurrent.futures"):
        logging.getLogger(name).addFilter(_is_no_orbax_traceback)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    # Orbax reads TensorStore's metrics around each save, for a line of its log. Each time TensorStore 0.1.86 leaks the
    # lists in them: 0.06 MB a save.
    if hasattr(tensorstore_utils, "get_tensorstore_raw_bytes"):
        tensorstore_utils.get_tensorstore_raw_bytes = lambda *_, **__: 0


def _is_no_orbax_traceback(record: logging.LogRecord) -> bool:
    """Drops the traceback that Orbax logs of each thread that fails or comes late; the save raises that error, once."""
    return "_SignalingThread.run() raised" not in str(record.msg) and "loop is closed" not in str(record.exc_info)
