"""Flips bits in every kind of file of a cache: it must be said, or do no harm. Never is other text trained on.

    python -m tests.chaos.cache_files [--flips=20]

The files are those of a finished cache (tokenizer, tokens, tables, indexes, the plan of packed rows), and of one whose
preparation was killed before the index was written. After each flip the cache is used as a run does: prepared, compared
with its checksums, and read to the end of an epoch.
"""

import argparse
import hashlib
import pathlib
import random
import re
import shutil
import sys
import tempfile

from absl import flags, logging

from pretrainax.config import Experiment, UserError
from pretrainax.data.corpus_check import CorpusCheck
from pretrainax.data.packing import BestFit
from pretrainax.data.pipeline import batches_of
from pretrainax.data.preparation.prepare import SPLITS, prepare
from pretrainax.data.sources import TextFiles
from tests.support import runs, tiny


def experiment(folder: pathlib.Path) -> Experiment:
    """Packed rows, whose plan is kept, of the text in `folder`, with the cache there."""
    made = tiny.get_config("gpt")
    made.data.source, made.data.cache_dir = TextFiles(str(folder / "text")), str(folder / "cache")
    made.data.packing, made.data.prepare_workers = BestFit(), 1
    return made


def use(folder: pathlib.Path) -> str:
    """Returns a digest of all that a run reads of a cache; UserError where something is wrong with it."""
    config, digest = experiment(folder), hashlib.sha256()
    prepared = prepare(config, report=lambda line: None)
    digest.update(prepared.tokenizer.fingerprint.encode())
    with CorpusCheck([*prepared.train, *prepared.valid]) as check:
        for split in SPLITS:
            batches = batches_of(config, prepared, split)
            for step in range(max(1, batches.rows_per_epoch // batches.global_batch_size)):
                for name, array in sorted(batches[step].items()):
                    digest.update(name.encode() + array.tobytes())
        check.wait()
    return digest.hexdigest()


def kind_of(path: pathlib.Path) -> str:
    """Names the files of a cache by what they are: "tokens", "npz", "index.json", "starts.npy"."""
    return re.sub(r"^\d+\.", "", path.name) if "tokenizers" not in path.parts else f"tokenizer: {path.name}"


class Cache:
    """A cache that is whole, and copies of it with a bit flipped."""

    def __init__(self, folder: pathlib.Path, finished: bool = True):
        self.folder, self.finished = folder, finished
        runs.write_text(folder / "text")
        self.digest = use(folder)
        if not finished:
            for index in (folder / "cache").rglob("index.json"):
                index.unlink()

    def files(self) -> dict[str, list[pathlib.Path]]:
        """Returns the files that hold something, by kind."""
        every = sorted(path for path in (self.folder / "cache").rglob("*") if path.is_file() and path.stat().st_size)
        kinds: dict[str, list[pathlib.Path]] = {}
        for path in every:
            kinds.setdefault(kind_of(path), []).append(path)
        return kinds

    def survives(self, path: pathlib.Path, rng: random.Random) -> str:
        """Flips a bit of a file and uses the cache: "named" in an error of one line, or "harmless"; else it raises."""
        cache, good = self.folder / "cache", self.folder / "good"
        shutil.copytree(cache, good)
        try:
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
            try:
                found = use(self.folder)
            except UserError as e:
                assert "\n" not in str(e) and "is damaged" in str(e) and str(cache) in str(e), e
                return "named"
            assert found == self.digest, "other text was read, and nothing said"
            return "harmless"
        finally:
            shutil.rmtree(cache)
            good.rename(cache)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=20, help="of each kind of file")
    given = parser.parse_args()
    flags.FLAGS.mark_as_parsed()
    logging.set_verbosity(logging.ERROR)
    report, rng, counts = runs.Report(), random.Random(0), {"named": 0, "harmless": 0}
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        for finished in (True, False):
            cache = Cache(pathlib.Path(scratch) / f"finished-{finished}", finished)
            for kind, paths in cache.files().items():
                with report.trying(f"{kind}{'' if finished else ' of a cache that is not finished'}"):
                    for _ in range(given.flips):
                        counts[cache.survives(rng.choice(paths), rng)] += 1
    tried = sum(counts.values())
    print(
        f"{tried} flips, {counts['named']} named, {counts['harmless']} harmless, {report.failed} kinds of file failed"
    )
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
