"""Opens a run's local folder: the workdir itself or, for an object store, a local copy for each process."""

import contextlib
from collections.abc import Iterator
from typing import Optional

from pretrainax.files.paths import is_url
from pretrainax.runtime.cluster import distributed_state
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.storage import places


@contextlib.contextmanager
def local_folder(workdir: str, local_dir: Optional[str] = None) -> Iterator[str]:
    """Yields the local folder in which a run trains (see `places.working_copy`); process 0 opens it first.

    Call this right after `host.start_jax`.
    """
    if not is_url(workdir):
        yield workdir
        return
    with contextlib.ExitStack() as stack:
        with Watchdog() as peers, peers.zero_first():
            folder = stack.enter_context(places.working_copy(workdir, local_dir, distributed_state().process_id))
        yield folder
