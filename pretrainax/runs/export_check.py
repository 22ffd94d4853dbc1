"""Warns at the start of a run if its model cannot be exported to transformers."""

from pretrainax.config import UserError
from pretrainax.interop.directories import describe_export
from pretrainax.training.callbacks import Callback


class ExportCheck(Callback):
    """Adds a warning to the run's header if the model cannot be exported to transformers."""

    part = "starting"

    def rows(self, run):
        try:
            describe_export(run.parts[-1].trained, run.prepared.tokenizer.vocabulary)
        except UserError as reason:
            return [("WARNING", f"cannot be exported to transformers: {reason}")]
        return []
