"""The first rows of a run's header: its workdir, its start, and the settings chosen for its devices."""

from typing import Optional

from pretrainax.storage import places
from pretrainax.training.loader_size import LoaderSize
from pretrainax.training.loop_state import LoopState
from pretrainax.training.run import Run
from pretrainax.training.start import Row


def rows_of_start(
    run: Run, workdir: str, loop_state: LoopState, extended: str, remat: str, loader: Optional[LoaderSize]
) -> list[Row]:
    """Returns the names and values of the rows.

    Args:
      extended: the line that `claim_workdir` returns for an extended run.
      remat: the requested setting.
      loader: the size of the loader; None if the speed of the devices is unknown.
    """
    experiment = run.experiment
    resumed = f", resumed at step {loop_state.step}" if loop_state.step else ""
    trackers = "; ".join(tracker.describe(workdir) for tracker in experiment.trackers)
    chosen = f"auto: {run.model.compute.remat}" if remat == "auto" else ""
    optional = [("steps", extended), ("counts", _uncounted(loop_state)), ("shown in", trackers), ("remat", chosen)]
    sent = f", {places.upload_status(workdir)}" if places.is_working_copy(workdir) else ""
    location = places.with_urls(workdir) + resumed + sent
    rows = [("workdir", location), *run.start.describe(experiment, workdir), *(row for row in optional if row[1])]
    return [*rows, loader.row()] if loader else rows


def _uncounted(loop_state: LoopState) -> str:
    """Returns the reason for missing counts of a run; "" if it has counts."""
    if loop_state.counts:
        return ""
    return "unknown: the version that started this run did not count text_tokens, text_bytes, tokens and flops"
