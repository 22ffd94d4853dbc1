"""Compares the files of corpora with their checksums, once, while the training goes on."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Optional

from pretrainax.config import UserError
from pretrainax.data.corpus import Corpus, damaged


class CorpusCheck:
    """Reads every file once, one after the other, in a thread of the lowest priority: `with CorpusCheck(...) as check`.

    The processes of a run share the files out. 100 GB are read at what the disk gives, at most 1 GB/s a process, and no
    step waits for it: what has been found is asked for by `raise_if_damaged`, before anything is kept.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        process_index: int = 0,
        process_count: int = 1,
        bring: Callable[[str], bool] = lambda path: True,
    ):
        """bring: has a file on this machine, of a corpus in a store; or says that it stays there, and is not read."""
        self._bring = bring
        self.elsewhere = 0  # files that stayed
        every = [(corpus, name) for corpus in corpora for name in sorted(corpus.checksums)]
        self._files = every[process_index::process_count]
        self.left = len(self._files)  # still to be read
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
        """Returns when all is read; raises as `raise_if_damaged`."""
        self._thread.join()
        self.raise_if_damaged()

    def raise_if_damaged(self) -> None:
        """Raises UserError, which names the file, where one that has been read is not as it was written."""
        if self._fault is not None:
            raise UserError(self._fault)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread alone, which Linux allows
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for corpus, name in self._files:
            try:
                if self._bring(os.path.join(corpus.directory, name)):
                    corpus.check(name, self._stop)
                else:
                    self.elsewhere += 1
            except UserError as e:
                self._fault = str(e)
            except OSError as e:
                self._fault = f"{damaged(os.path.join(corpus.directory, name))} ({e.strerror})"
            if self._fault is not None or self._stop.is_set():
                return
            self.left -= 1
