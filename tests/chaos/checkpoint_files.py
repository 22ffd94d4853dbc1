"""Damages each file of a checkpoint. A restore must name the file, never use the checkpoint, and use the previous step.

If the previous step is damaged too, the restore must raise an error and delete nothing.

    python -m tests.chaos.checkpoint_files [--flips=20]

A damaged file has one flipped bit (at `flips` places), or it is cut in half, cut by one byte, empty, one byte longer,
missing, or replaced by a folder. The state is the one of tests/checkpoints/test_checkpoints.py, on one device.
"""

import argparse
import os
import pathlib
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator

from absl import logging

from pretrainax.config import UserError
from tests.support import runs

Damage = Callable[[pathlib.Path], None]


def _flip(place: float) -> Damage:
    def flip(path: pathlib.Path) -> None:
        content = bytearray(path.read_bytes())
        if content:
            content[int(place * len(content))] ^= 1 << int(place * 1e6) % 8
        path.write_bytes(content)

    return flip


def _folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "stray").write_text("?")


def damages(flips: int, rng: random.Random) -> dict[str, Damage]:
    return {
        **{f"a bit flipped at {place:.4f}": _flip(place) for place in (rng.random() for _ in range(flips))},
        "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
        "cut by a byte": lambda path: os.truncate(path, max(0, path.stat().st_size - 1)),
        "emptied": lambda path: os.truncate(path, 0),
        "a byte longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        "missing": os.remove,
        "a folder": _folder,
    }


def two_steps(folder: pathlib.Path) -> pathlib.Path:
    from tests.support.checkpoints import save_all

    save_all(folder / "checkpoints", [10, 20])
    return folder / "checkpoints"


def files(step: pathlib.Path) -> Iterator[pathlib.Path]:
    yield from (path.relative_to(step) for path in sorted(step.rglob("*")) if path.is_file())


def _counterpart(step: pathlib.Path, other: pathlib.Path, file: pathlib.Path) -> pathlib.Path:
    """Returns the file of `step` that corresponds to `file` in `other`; Orbax gives data files random names."""
    names, others = (sorted(os.listdir(folder / file.parent)) for folder in (step, other))
    return (
        step / file if file.name in names else step / file.parent / names[min(others.index(file.name), len(names) - 1)]
    )


def try_one(good: pathlib.Path, file: pathlib.Path, damage: Damage) -> None:
    """Damages step 20 in a copy, restores, and checks the warning and the remaining files."""
    import chex

    from tests.support.checkpoints import make_state, restore

    folder = good.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    before = (folder / "20" / file).read_bytes()
    damage(folder / "20" / file)
    path = folder / "20" / file
    if path.is_file() and path.read_bytes() == before:
        return  # the file was empty already
    (step, state, extra), (warning,) = restore(folder)
    assert step == 10 and extra == {"note": "from 10"}
    chex.assert_trees_all_equal(state, make_state(10))
    named = str(file) in warning or file.name == "manifest.sha256"
    assert warning.startswith("checkpoint 20 is not used: ") and named, warning
    assert (folder / "20").exists()
    damage(_counterpart(folder / "10", good / "20", file))
    left = runs.files(folder)
    try:
        restore(folder)
        raise AssertionError("both steps are damaged, but one of them was used")
    except UserError as e:
        assert "is damaged" in str(e) and "step 20: " in str(e) and "step 10: " in str(e) and "\n" not in str(e), e
    assert runs.files(folder) == left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=20)
    given = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    logging.set_verbosity(logging.ERROR)
    report, count, rng = runs.Report(), 0, random.Random(0)
    with tempfile.TemporaryDirectory(prefix="chaos") as scratch:
        good = two_steps(pathlib.Path(scratch))
        for file in files(good / "20"):
            with report.trying(str(file)):
                for damage in damages(given.flips, rng).values():
                    try_one(good, file, damage)
                    count += 1
    print(f"{count} damaged checkpoints; failures in {report.failed} files: a damaged checkpoint was used or not named")
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
