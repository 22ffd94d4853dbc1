"""Damages each kind of file in a cache. A run must report the damage or be unaffected, and never train on other text.

    python -m tests.chaos.cache_files [--flips=20]

There are two caches: a finished cache (tokenizer, tokens, tables, indexes, the plan of packed rows), and a cache whose
preparation was killed before it wrote the index. A damaged file has a flipped bit, or it is missing, empty, truncated,
longer, a folder, a broken link, or the file of another split. After each damage, the cache is used as in a run: it is
prepared, compared with its checksums, and read to the end of an epoch.
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
    """Returns a config with packed rows, whose dataset and cache are in `folder`."""
    made = tiny.get_config("gpt")
    made.data.source, made.data.cache_dir = TextFiles(str(folder / "text")), str(folder / "cache")
    made.data.packing, made.data.prepare_workers = BestFit(), 1
    return made


def use(folder: pathlib.Path) -> str:
    """Returns a digest of everything that a run reads from a cache; raises UserError if the cache is damaged."""
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
    """Returns the kind of a cache file: "tokens", "npz", "index.json", "starts.npy"."""
    return re.sub(r"^\d+\.", "", path.name) if "tokenizers" not in path.parts else f"tokenizer: {path.name}"


def flip(path: pathlib.Path, rng: random.Random) -> None:
    """Flips one random bit."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def be_a_folder(path: pathlib.Path, rng: random.Random) -> None:
    """Replaces a file by a folder that contains a file."""
    path.unlink()
    path.mkdir()
    (path / "a").write_text("")


def lead_nowhere(path: pathlib.Path, rng: random.Random) -> None:
    """Replaces a file by a broken link."""
    path.unlink()
    path.symlink_to(path.parent / "nothing")


def be_of_another_split(path: pathlib.Path, rng: random.Random) -> None:
    """Copies the file of the same name from the other split, if it exists there."""
    other = {"train": "valid", "valid": "train"}.get(path.parent.name, path.parent.name)
    if (source := path.parent.with_name(other) / path.name).is_file() and source != path:
        shutil.copyfile(source, path)


DAMAGES = {
    "flipped": flip,
    "gone": lambda path, rng: path.unlink(),
    "empty": lambda path, rng: path.write_bytes(b""),
    "cut": lambda path, rng: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer": lambda path, rng: path.write_bytes(path.read_bytes() + b"\0" * 8),
    "folder": be_a_folder,
    "link": lead_nowhere,
    "of_another_split": be_of_another_split,
}


class Cache:
    """An intact cache, and copies with a damaged file."""

    def __init__(self, folder: pathlib.Path, finished: bool = True):
        self.folder, self.finished = folder, finished
        runs.write_text(folder / "text")
        self.digest = use(folder)
        if not finished:
            for index in (folder / "cache").rglob("index.json"):
                index.unlink()

    def files(self) -> dict[str, list[pathlib.Path]]:
        """Returns the files that are not empty, by kind."""
        every = sorted(path for path in (self.folder / "cache").rglob("*") if path.is_file() and path.stat().st_size)
        kinds: dict[str, list[pathlib.Path]] = {}
        for path in every:
            kinds.setdefault(kind_of(path), []).append(path)
        return kinds

    def survives(self, path: pathlib.Path, rng: random.Random, damage: str = "flipped") -> str:
        """Damages a file and uses the cache; returns "named" after a one-line error or "harmless", or raises."""
        cache, good = self.folder / "cache", self.folder / "good"
        shutil.copytree(cache, good)
        try:
            DAMAGES[damage](path, rng)
            try:
                found = use(self.folder)
            except UserError as e:
                assert "\n" not in str(e) and "delete" in str(e) and str(cache) in str(e), e
                return "named"
            assert found == self.digest, "other text was read, without an error"
            return "harmless"
        finally:
            shutil.rmtree(cache)
            good.rename(cache)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--flips", type=int, default=20, help="flips per kind of file; each other damage is applied once"
    )
    given = parser.parse_args()
    flags.FLAGS.mark_as_parsed()
    logging.set_verbosity(logging.ERROR)
    report, rng, counts = runs.Report(), random.Random(0), {"named": 0, "harmless": 0}
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        for finished in (True, False):
            cache = Cache(pathlib.Path(scratch) / f"finished-{finished}", finished)
            for kind, paths in cache.files().items():
                for damage in DAMAGES:
                    with report.trying(f"{kind} {damage}{'' if finished else ' in an unfinished cache'}"):
                        for _ in range(given.flips if damage == "flipped" else 1):
                            counts[cache.survives(rng.choice(paths), rng, damage)] += 1
    tried = sum(counts.values())
    print(f"{tried} damages: {counts['named']} reported, {counts['harmless']} harmless; {report.failed} kinds failed")
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
