"""Tests runs in object stores with faults and kills, and compares the result with an undisturbed run on a disk.

    python -m tests.chaos.store --times=20 [--stores=gs,s3] [--only=kill_train,…] [--whole=DIR] [--seed=0]

Each store has `--times` trials, one after the other from this list: training, preparation or export is killed at random
moments (and its files are kept or lost), two starts at the same time, a flipped byte in the newest checkpoint, a slow
store, closed connections, responses 429, 503 and 504, and a store that rejects all writes (403) or is full (507) after
some time.
"""

import contextlib
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

import fsspec

from pretrainax.storage import places
from pretrainax.storage.store import Store
from tests.chaos.kill import killed
from tests.support import fake_gcs, faulty_proxy, moto_s3, runs


@contextlib.contextmanager
def serving(scheme: str) -> Iterator[faulty_proxy.FaultyProxy]:
    """Yields a proxy in front of a store; fsspec in this process and its child processes uses the proxy."""
    with contextlib.ExitStack() as stack:
        if scheme == "gs":
            server = stack.enter_context(fake_gcs.serving())
            proxy = stack.enter_context(faulty_proxy.before(server.url, is_xml=False))
            proxy.gcs = server
            environment, settings = fake_gcs.environment(proxy.url), {"endpoint_url": proxy.url, "token": "anon"}
        else:
            proxy = stack.enter_context(faulty_proxy.before(stack.enter_context(moto_s3.serving()), is_xml=True))
            environment, settings = moto_s3.environment(proxy.url), moto_s3.settings(proxy.url)
        fsspec.config.conf[scheme] = settings
        os.environ.update(environment)
        runs.ENV.update(environment)
        yield proxy


class Trials:
    """The trials, one per method. `folder` has all local files of the commands."""

    def __init__(self, scheme: str, proxy: faulty_proxy.FaultyProxy, whole: runs.Whole, folder: pathlib.Path):
        self.proxy, self.whole, self.folder = proxy, whole, folder
        self.rng, self.count, self.scheme, self.kills = random.Random(), 0, scheme, 0
        self.url = ""

    def begin(self, rng: random.Random) -> None:
        """Starts with a new folder in the bucket, an empty machine, and no fault."""
        self.count, self.rng = self.count + 1, rng
        self.url = f"{self.scheme}://bucket/{self.count}"
        self.mend()
        self.lose_machine()

    def mend(self) -> None:
        self.proxy.mend()

    def lose_machine(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        runs.ENV["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"] = str(self.folder / "machine")
        places._mirrors.clear()

    # --- kills

    def kill_train(self) -> None:
        for _ in range(self.rng.randint(1, 2)):
            steps = len(self._names("checkpoints"))
            grown = lambda n=steps: len(self._names("checkpoints")) > n  # noqa: E731
            begun = grown if self.rng.random() < 0.7 else lambda: True
            self.kills += killed(self.training(), self.rng.uniform(0, 3), begun)
            if self.rng.random() < 0.5:
                self.lose_machine()
        self.ends_the_same()

    def kill_prepare(self) -> None:
        args = runs.preparing(self.whole.config, self.whole.text, f"{self.url}/cache")
        for _ in range(2):
            self.kills += killed(args, self.rng.uniform(0, self.whole.seconds.get("prepare", 10)))
        self._succeeds(args)
        for part in ("tokenizers", "corpora"):
            assert self._digests(f"cache/{part}") == runs.files(self.whole.cache / part)

    def kill_export(self) -> None:
        args = runs.exporting(self.whole.run, f"{self.url}/export")
        for _ in range(2):
            self.kills += killed(args, self.rng.uniform(0, self.whole.seconds.get("export", 10)))
        done = runs.run(args)
        assert done.returncode == 0 or "is not empty" in runs.last_line(done), done.stderr[
            -2000:
        ]  # the export was complete
        assert self._digests("export") == runs.files(self.whole.export)

    # --- faults of a run

    def two_at_once(self) -> None:
        first = runs.start(self.training())
        time.sleep(self.rng.uniform(0, 3))
        runs.ENV["XDG_CACHE_HOME"] = str(self.folder / "another")
        second = runs.run(self.training())
        assert first.wait() == 0 or second.returncode == 0
        assert second.returncode == 0 or "is in use by" in second.stderr or "was taken over" in second.stderr
        self.lose_machine()
        self.ends_the_same()

    def flipped_byte(self) -> None:
        self._succeeds(self.training())
        store = Store(f"{self.url}/run")
        newest = max(int(name.split("/")[1]) for name in store.objects("checkpoints"))
        name = self.rng.choice([n for n, stamp in store.objects(f"checkpoints/{newest}").items() if stamp.size])
        content = bytearray(store.read(name))
        content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        store.write(name, bytes(content))
        self.lose_machine()
        self.ends_the_same()

    def slow(self) -> None:
        self.proxy.delay = 0.4
        self.ends_the_same()

    def busy(self) -> None:
        self.proxy.fault = lambda method: self.rng.choice([429, 503, 504]) if self.rng.random() < 0.2 else None
        self.ends_the_same()

    def drops(self) -> None:
        self.proxy.fault = lambda method: faulty_proxy.DROPPED if self.rng.random() < 0.1 else None
        self.ends_the_same()

    def refuses(self) -> None:
        self._takes_nothing(403)

    def is_full(self) -> None:
        self._takes_nothing(507)

    def _takes_nothing(self, status: int) -> None:
        """Rejects writes after some time; the run must end with one line, and resume after the repair."""
        began, wait = time.monotonic(), self.rng.uniform(0, 25)
        is_write = ("POST", "PUT")
        self.proxy.fault = lambda m: status if m in is_write and time.monotonic() > began + wait else None
        done = runs.run(self.training())
        self.mend()
        if done.returncode:
            assert runs.last_line(done).startswith("pretrainax: "), done.stderr[-500:]
            assert ("refuses this user" if status == 403 else "is full") in runs.last_line(done), done.stderr
        self.ends_the_same()

    # --- what is left

    def training(self) -> list[str]:
        return self.whole.training(f"{self.url}/run")

    def ends_the_same(self) -> None:
        """Checks that the command succeeds and the bucket has the same files as the undisturbed run on disk."""
        self._succeeds(self.training())
        self.mend()
        self.lose_machine()
        here = places.local_path(f"{self.url}/run")
        places.complete(here)
        runs.assert_same_run(pathlib.Path(here), self.whole.run)
        assert runs.valid_steps(pathlib.Path(here)) == runs.steps(self.whole.run)

    def _succeeds(self, args: list[str]) -> None:
        done = runs.run(args)
        assert done.returncode == 0, done.stderr[-2000:]

    def _names(self, folder: str) -> list[str]:
        return [name for name in Store(f"{self.url}/run").objects(folder) if name.endswith("manifest.sha256")]

    def _digests(self, folder: str) -> dict[str, str]:
        """Returns the result of `runs.files` for a folder in the bucket."""
        store, local = Store(f"{self.url}/{folder}"), self.folder / "brought"
        for name in store.objects():
            store.get(name, str(local / folder / name))
        return runs.files(local / folder)


NAMES = (
    *("kill_train", "kill_train", "kill_train", "kill_prepare", "kill_export", "two_at_once", "flipped_byte"),
    *("slow", "busy", "drops", "refuses", "is_full"),
)


def main() -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--stores", default="gs,s3")
    parser.add_argument("--only", default=",".join(NAMES))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, report, kills, faults = random.Random(given.seed), runs.Report(), 0, 0
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        whole = runs.Whole(given.config, pathlib.Path(given.whole or f"{scratch}/whole"))
        for scheme in given.stores.split(","):
            with serving(scheme) as proxy:
                trials, names = Trials(scheme, proxy, whole, pathlib.Path(scratch) / "machine"), given.only.split(",")
                for i in range(given.times):
                    name = names[i % len(names)]  # each name once before any is repeated
                    with report.trying(f"{scheme} {name}"):
                        trials.begin(rng)
                        getattr(trials, name)()
                kills, faults = kills + trials.kills, faults + proxy.faults
    print(f"{kills} kills and {faults} requests with injected faults")
    return report.sum_up()


if __name__ == "__main__":
    sys.exit(main())
