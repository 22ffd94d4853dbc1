"""Serves the page of `report` during runs, with their progress: `python -m pretrainax.watch RUN... [--seconds=10]`.

RUN is the folder of a run, or a folder of runs, such as `runs`; the page also shows new runs in it. The page has the
curves, and for each run its steps, its losses, the remaining time, the goodput, the health of the last validation and
the latest samples. It updates itself, and loads nothing from the network.

The command prints the URL of the page. It ends with a random token, and only this machine can open it. From another
machine, forward the port: `ssh -L 8765:127.0.0.1:8765 HOST`, here with --port=8765. SECURITY.md describes the
protection. Ctrl-C ends the command; it changes nothing in the runs.
"""

import contextlib
import glob
import itertools
import os
import threading
from collections.abc import Sequence

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError
from pretrainax.reporting.live_server import LiveServer, Pages
from pretrainax.reporting.run_lines import AXES

# Entries of a run's folder from which `report` reads. A link in them could show another file of this machine.
_READ = ("*", "tokenizer/*", "checkpoints/*", "checkpoints/*/run.json")


def main() -> None:
    """Defines the flags and runs the command."""
    axis = flags.DEFINE_enum("by", "step", list(AXES), "The first x-axis of the page")
    metrics = flags.DEFINE_list("metrics", [], "Metrics of metrics.jsonl to plot; by default the main ones")
    port = flags.DEFINE_integer("port", 0, "Port on 127.0.0.1; 0: a free one", lower_bound=0, upper_bound=65_535)
    seconds = flags.DEFINE_float("seconds", 10.0, "Interval between two updates of the page", lower_bound=1.0)

    def run(*paths: str) -> int:
        if not paths:
            raise UserError("give the folders of runs: python -m pretrainax.watch runs")
        for path in paths:
            if not os.path.isdir(path):
                raise UserError(f"{path} is not a folder: give the --workdir of a run, or a folder of runs")
        with LiveServer(_pages(paths, metrics.value, axis.value, seconds.value), port.value) as server:
            print(server.url, flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        return 0

    cli.run(run, texts=True, run_flags=())


def _pages(paths: tuple[str, ...], metrics: list[str], axis: str, seconds: float) -> Pages:
    """Returns the functions that render the page and its updates from the folders at `paths`."""
    from pretrainax.reporting import runs_page  # local imports: these import JAX
    from pretrainax.runs.run_reports import distinct, read_report, run_folders
    from pretrainax.runs.run_status import latest_samples, status_table

    lock = threading.Lock()  # one request at a time reads the runs: several open pages must not slow a run down

    def read():
        with lock:
            folders = []
            for path in paths:
                found = [folder for folder in run_folders(path) if _has_lines(folder)]
                check_links(path, found)
                folders += found
            if not folders:
                raise UserError(f"no run in {' '.join(paths)} has a line in its metrics.jsonl yet: load the page again")
            folders = distinct(folders)
            report = read_report(folders, metrics, axis)
            samples = latest_samples(report, folders)
            return report, runs_page.Live(status_table(report, folders), seconds, samples)

    def page() -> str:
        report, live = read()
        return runs_page.render(report, b"", live)

    def data() -> str:
        return runs_page.update(*read())

    return Pages(page, data)


def _has_lines(folder: str) -> bool:
    path = os.path.join(folder, "metrics.jsonl")
    return os.path.isfile(path) and os.path.getsize(path) > 0


def check_links(path: str, folders: Sequence[str]) -> None:
    """Raises UserError if a run in `path`, or an entry of it that `report` reads, is a link out of `path`.

    Args:
      folders: the folders of the runs.
    """
    root = os.path.realpath(path)
    for folder, pattern in itertools.product(folders, _READ):
        for entry in glob.glob(os.path.join(glob.escape(folder), pattern)):
            if os.path.commonpath([root, os.path.realpath(entry)]) != root:
                raise UserError(f"{entry} leads to a place outside of {path}: remove the link")


if __name__ == "__main__":
    main()
