"""Creates the folder of an export, which exists only if the export is complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator

from pretrainax.config import RunFailed, UserError


@contextlib.contextmanager
def new_directory(to: str) -> Iterator[str]:
    """Yields a temporary directory, which becomes `to` on exit, or is removed after an exception.

    Raises:
      RunFailed: the directory cannot be written.
    """
    staging = f"{os.path.abspath(to)}.exporting"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        os.makedirs(staging)
        yield staging
        if os.path.isdir(to):
            os.rmdir(to)
        os.rename(staging, to)
    except OSError as e:
        raise RunFailed(f"could not write --to={to}: {e.strerror or e}") from e
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def run_to_export(workdir: str, to: str) -> str:
    """Returns the path of a run's config file; raises UserError if this file is missing or `to` is not empty."""
    config_path = os.path.join(workdir, "config.json")
    if not os.path.exists(config_path):
        raise UserError(f"--workdir={workdir} holds no config.json: give the run directory of pretrainax.main")
    if os.path.isdir(to) and os.listdir(to):
        raise UserError(f"--to={to} is not empty: set another directory")
    return config_path
