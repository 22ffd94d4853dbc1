"""Shows the transformers class of a run's export at the start of the run."""

from pretrainax.config import UserError
from pretrainax.interop.directories import describe_export
from pretrainax.models.base import model_of
from pretrainax.training.callbacks import Callback
from pretrainax.training.wrapped import plain


class ExportCheck(Callback):
    """Adds the transformers class of the export to the run's header, or a warning if there is no such class."""

    part = "starting"

    def rows(self, run):
        trained = run.parts[-1].trained
        if type(model := plain(run.model)) is not model_of(trained.model):
            use = f"load and export build config.model instead of {type(model).__name__}, with other parameters"
            return [("WARNING", f"{use}: name it in config.model.parts to use it after training")]
        try:
            _, config_json, _ = describe_export(trained, run.prepared.tokenizer.vocabulary)
        except UserError as reason:
            return [("WARNING", f"cannot be exported as a model of transformers: {reason}")]
        return [("exports as", f"{config_json['architectures'][0]} of transformers")]
