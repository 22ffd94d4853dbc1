"""Replaces each input file by a special file: `python -m tests.fuzz.special_files [--only=NAME]`.

A FIFO, a device, a socket, a folder, a link to itself, a broken link or a file of a terabyte must raise a one-line
UserError, or not be read. A link to the valid file must be read as the file. Each trial has a separate process.
"""

import argparse
import os
import pathlib
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable

from tests.fuzz.forked import run_forked
from tests.fuzz.formats import Format, formats

SECONDS = 60
ADDRESS_SPACE = 8 << 30  # limit of a process that reads one file
_ANY_SIZE = (
    "json_lines",
    "parquet",
    "array_record",
    "checkpoint",
)  # formats whose files are read to the end, at any size


def _socket(path: pathlib.Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(here)


def _terabyte(path: pathlib.Path) -> None:
    with open(path, "wb") as f:
        f.truncate(1 << 40)


SPECIAL: dict[str, Callable[[pathlib.Path], None]] = {
    "fifo": os.mkfifo,
    "socket": _socket,
    "folder": os.mkdir,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "tty": lambda path: path.symlink_to("/dev/ptmx"),
    "loop": lambda path: path.symlink_to(path.name),
    "nothing": lambda path: path.symlink_to("nowhere"),
    "terabyte": _terabyte,
}


def fault(name: str, form: Format, file: str, kind: str, folder: pathlib.Path) -> str:
    """Reads the format with one file replaced; returns the failure, or an empty string."""
    bad = folder / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(folder / "good", bad)
    (bad / file).unlink()
    if kind == "link":
        (bad / file).symlink_to(folder / "good" / file)
    else:
        SPECIAL[kind](bad / file)

    def read() -> int:
        from pretrainax import cli
        from pretrainax.config import UserError

        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        try:
            form.read(bad)
        except UserError as e:
            return cli.report_error(e)
        return 0

    code, text = run_forked(read, folder / "said.txt", SECONDS)
    if kind == "link":
        return "" if code == 0 else f"exit code {code}: {text[-600:]}"
    refused = code == 2 and len(text.splitlines()) == 1
    return "" if refused or code == 0 else f"exit code {code}: {text[-1500:]}"


def try_all(only: list[str], kinds: list[str]) -> tuple[int, list[str]]:
    """Returns the number of files tried, and a line for each failure.

    Args:
      only: names of formats.
      kinds: keys of SPECIAL, and "link".
    """
    import tests.checkpoints.test_checkpoints  # imported once for all processes
    import tests.support.huggingface_weights  # noqa: F401

    count, faults = 0, []
    for name in only:
        form = formats()[name]
        with tempfile.TemporaryDirectory(prefix="special") as scratch:
            folder = pathlib.Path(scratch)
            (folder / "good").mkdir()
            code, text = run_forked(lambda form=form, folder=folder: form.make(folder / "good"), folder / "made", 120)
            assert code == 0, text
            for file in sorted(form.damage):
                for kind in kinds:
                    if kind == "terabyte" and name.startswith(_ANY_SIZE):
                        continue
                    count += 1
                    if wrong := fault(name, form, file, kind, folder):
                        faults.append(f"{name} {file} {kind}: {wrong}")
                        print(faults[-1], flush=True)
    return count, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # the reader of checkpoint_resealed writes a manifest first
    names, every = [name for name in formats() if name != "checkpoint_resealed"], ["link", *SPECIAL]
    parser.add_argument("--only", default=",".join(names), help="formats")
    parser.add_argument("--kinds", default=",".join(every), help="kinds of special files")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    started = time.perf_counter()
    given = parser.parse_args()
    count, faults = try_all(given.only.split(","), given.kinds.split(","))
    print(f"{count:,} special files, {len(faults)} faults, {time.perf_counter() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
