"""The folder of a run on this machine: the workdir itself, or of one in an object store a twin of each process."""

import contextlib
from collections.abc import Iterator
from typing import Optional

from pretrainax.files.paths import is_url
from pretrainax.runtime.cluster import distributed_state
from pretrainax.runtime.watchdog import Watchdog
from pretrainax.storage import places


@contextlib.contextmanager
def at_work(workdir: str, local_dir: Optional[str] = None) -> Iterator[str]:
    """Yields the folder to train in, as `places.at_work`; of several processes, process 0 has it before all others.

    Right after `host.start_jax`.
    """
    if not is_url(workdir):
        yield workdir
        return
    with contextlib.ExitStack() as held:
        with Watchdog() as peers, peers.zero_first():
            folder = held.enter_context(places.at_work(workdir, local_dir, distributed_state().process_id))
        yield folder
