"""Verifies the checksums of corpus files once per run, in the background during training."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Optional

from pretrainax.config import UserError
from pretrainax.data.corpus import Corpus, damage_message


class CorpusCheck:
    """Verifies each file once, in a background thread with the lowest priority: `with CorpusCheck(...) as check`.

    The files are divided among the processes of the run. Each process reads one file at a time, at disk speed but no
    faster than 1 GB/s (100 GB take at least 100 s). Training steps never wait for the check. Call `raise_if_damaged`
    before saving anything.
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
          corpora: the corpora of the run.
          process_index: index of this process.
          process_count: number of processes that divide the files.
          fetch: called with the path of each file. It makes sure that the file is on this machine, downloading it if
            needed, and returns True; or it returns False to leave the file in the object store, unchecked.
        """
        self._fetch = fetch
        self.elsewhere = 0  # number of files that stay in the store, unchecked
        files = [(corpus, name) for corpus in corpora for name in sorted(corpus.checksums)]
        self._files = files[process_index::process_count]
        self.left = len(self._files)  # number of files that have not been checked yet
        self.unknown = [corpus.directory for corpus in corpora if not corpus.checksums]  # corpora without checksums
        self._error_message: Optional[str] = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)

    def __enter__(self) -> "CorpusCheck":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()

    def wait(self) -> None:
        """Waits until this process has read all of its files, then calls `raise_if_damaged`."""
        self._thread.join()
        self.raise_if_damaged()

    def raise_if_damaged(self) -> None:
        """Raises UserError, naming the file, if the check has found a damaged file."""
        if self._error_message is not None:
            raise UserError(self._error_message)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # only Linux sets the priority of a single thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for corpus, name in self._files:
            try:
                if self._fetch(os.path.join(corpus.directory, name)):
                    corpus.check(name, self._stop)
                else:
                    self.elsewhere += 1
            except UserError as e:
                self._error_message = str(e)
            except OSError as e:
                self._error_message = f"{damage_message(os.path.join(corpus.directory, name))} ({e.strerror})"
            if self._error_message is not None or self._stop.is_set():
                return
            self.left -= 1
