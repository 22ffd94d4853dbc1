"""Verifies the checksums of corpus files once, in the background of the training."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Optional

from pretrainax.config import UserError
from pretrainax.data.corpus import Corpus, damage_message


class CorpusCheck:
    """Verifies every file once, one at a time, in a thread of the lowest priority: `with CorpusCheck(...) as check`.

    The processes of a run divide the files among themselves. Each process reads at the speed of the disk, at most 1
    GB/s (100 GB take at least 100 s), and no training step waits for the check. Call `raise_if_damaged` before saving
    anything.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        process_index: int = 0,
        process_count: int = 1,
        fetch: Callable[[str], bool] = lambda path: True,
    ):
        """Selects the files that this process checks.

        Args:
          fetch: makes a file of a corpus in a store local and returns True; returns False if the file stays in the
            store. Files that stay in the store are not checked.
        """
        self._fetch = fetch
        self.elsewhere = 0  # number of files that stay in the store, unchecked
        files = [(corpus, name) for corpus in corpora for name in sorted(corpus.checksums)]
        self._files = files[process_index::process_count]
        self.left = len(self._files)  # number of files that have not been read yet
        self.unknown = [corpus.directory for corpus in corpora if not corpus.checksums]
        self._fault: Optional[str] = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)

    def __enter__(self) -> "CorpusCheck":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()

    def wait(self) -> None:
        """Waits until all files of this process have been read, then calls `raise_if_damaged`."""
        self._thread.join()
        self.raise_if_damaged()

    def raise_if_damaged(self) -> None:
        """Raises UserError with the path of a damaged file if the check has found a damaged file."""
        if self._fault is not None:
            raise UserError(self._fault)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux sets the priority of a single thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for corpus, name in self._files:
            try:
                if self._fetch(os.path.join(corpus.directory, name)):
                    corpus.check(name, self._stop)
                else:
                    self.elsewhere += 1
            except UserError as e:
                self._fault = str(e)
            except OSError as e:
                self._fault = f"{damage_message(os.path.join(corpus.directory, name))} ({e.strerror})"
            if self._fault is not None or self._stop.is_set():
                return
            self.left -= 1
