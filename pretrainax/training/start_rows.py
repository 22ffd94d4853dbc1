"""The first rows of a run's header: where it is, what it starts from, what was chosen for its devices."""

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
      extended: what `claim_workdir` says of a run that goes on past its planned end.
      remat: that was asked for.
      loader: None: nothing is known of what the devices need.
    """
    experiment = run.experiment
    resumed = f", resumed at step {loop_state.step}" if loop_state.step else ""
    shown = "; ".join(tracker.describe(workdir) for tracker in experiment.trackers)
    chosen = f"auto: {run.model.compute.remat}" if remat == "auto" else ""
    said = [("steps", extended), ("counts", _uncounted(loop_state)), ("shown in", shown), ("remat", chosen)]
    sent = f", {places.sent_line(workdir)}" if places.is_at_work(workdir) else ""
    where = places.named(workdir) + resumed + sent
    rows = [("workdir", where), *run.start.describe(experiment, workdir), *(row for row in said if row[1])]
    return [*rows, loader.row()] if loader else rows


def _uncounted(loop_state: LoopState) -> str:
    """Returns why the counts of a run are not known; "" where they are."""
    if loop_state.counts:
        return ""
    return "not of this run: the version that began it did not count text_tokens, text_bytes, tokens and flops"
