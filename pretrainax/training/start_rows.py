"""Builds the first rows of a run's header: workdir, initial parameters, and settings chosen for the devices."""

from collections.abc import Sequence
from typing import Optional

from pretrainax.storage import places
from pretrainax.training.loader_size import LoaderSize
from pretrainax.training.loop_state import LoopState
from pretrainax.training.run import Run
from pretrainax.training.start import Row

_NO_COUNTS = "unknown: the version that started this run did not count text_tokens, text_bytes, tokens and flops"


def rows_of_start(
    run: Run, workdir: str, loop_state: LoopState, claimed: Sequence[Row], remat: str, loader: Optional[LoaderSize]
) -> list[Row]:
    """Builds the first (name, value) rows of a run's header.

    Args:
      claimed: the rows of `claim_workdir`.
      remat: the original value of `config.train.remat`, which may be "auto".
      loader: the measurements of the data loader, or None if the speed of the devices is unknown.
    """
    experiment = run.experiment
    resumed = f", resumed at step {loop_state.step}" if loop_state.step else ""
    trackers = "; ".join(tracker.describe(workdir) for tracker in experiment.trackers)
    is_planned = experiment.train.remat != "auto"  # `resolve_remat` has set it
    phases = ", chosen for the phase that needs the most memory" if run.phases and is_planned else ""
    resolved = f"auto: {run.model.compute.remat}{phases}" if remat == "auto" else ""
    counts = "" if loop_state.counts else _NO_COUNTS
    optional = [*claimed, ("counts", counts), ("shown in", trackers), ("remat", resolved)]
    upload_status = f", {places.upload_status(workdir)}" if places.is_working_copy(workdir) else ""
    location = places.with_urls(workdir) + resumed + upload_status
    rows = [("workdir", location), *run.start.describe(experiment, workdir), *(row for row in optional if row[1])]
    return [*rows, loader.row()] if loader else rows
