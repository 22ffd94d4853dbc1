"""Imports and exports Hugging Face models: `python -m pretrainax.huggingface export --workdir=RUN --to=DIR`.

    python -m pretrainax.huggingface import --from=DIR --workdir=DIR
    python -m pretrainax.huggingface export --workdir=RUN --to=DIR [--dtype=bfloat16] [--part=generator] [--adapter]
    python -m pretrainax.huggingface export --workdir=RUN --push=org/name [--to=DIR] [--license=mit] [--private]

Neither an import nor an export needs memory for the whole model. RUN is the folder of a run, for its newest checkpoint,
or RUN@2000 (the same as `--step=2000`), RUN@best, RUN@average (the mean of all saved checkpoints; RUN@average5: of the
newest 5), RUN@ema (the moving average of the parameters) or RUN@trained (the trained parameters). Without @ema or
@trained, it exports the parameters that the run validates.

A directory has config.json, safetensors files (one, or several with an index) and a tokenizer. --from=hf:org/name, or
hf:org/name@revision, is a model of the Hugging Face Hub. Only these files are downloaded, into the cache of the Hugging
Face libraries.

An import creates a workdir that can be evaluated and exported and that can start runs:
`--config.checkpoint.init_from` takes this workdir, the directory or hf:org/name. A model without heads (a BertModel)
cannot be imported; start a run from it with `--config.checkpoint.fresh_heads=True`. Imports and exports of bfloat16
tensors are exact. An export has a manifest.sha256, which an import checks if it exists.

An export has a model card, README.md, generated from the folder of the run. --license sets the license in the card.
--config=NAME, the config of the run, adds the source of each number to the card. --push uploads the export as one
commit, as the user of the token (`hf auth login`, HF_TOKEN). --private makes a new repository private.

For a run with `config.tuning`, an export has the merged model. With --adapter it has only the trained parameters, in
the format of the library peft. An import also reads such a directory; --base=DIR is the base model of the adapter. An
adapter gets a card and can be pushed only if its run started from a model of the hub, because others do not have a
local base model.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Optional

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError
from pretrainax.files.paths import define_path
from pretrainax.interop.adapters import export_adapter, import_adapter, is_adapter
from pretrainax.interop.directories import DTYPES, export_workdir, import_directory
from pretrainax.interop.origin import Origin, find_origin, split_selector
from pretrainax.interop.start import experiment_of, load_recorded_start
from pretrainax.runs.model_card import Recipe, write_card
from pretrainax.storage import hub
from pretrainax.storage.places import local_path, with_urls


def main() -> None:
    """Defines the flags and runs the command. The flags are local because other commands use the same names."""
    defined = {
        "from": define_path("from", None, "import: Hugging Face directory or hf:org/name[@revision]", True),
        "to": define_path("to", None, "export: folder to create"),
        "step": flags.DEFINE_integer("step", None, "export: step of the checkpoint; by default the newest"),
        "dtype": flags.DEFINE_enum(
            "dtype", None, list(DTYPES), "export: dtype of the tensors; by default as imported, or float32"
        ),
        "part": flags.DEFINE_enum(
            "part", "discriminator", ["discriminator", "generator"], "export: part of an ELECTRA model"
        ),
        "adapter": flags.DEFINE_bool(
            "adapter", False, "export: only the trained parameters of config.tuning, for peft"
        ),
        "base": define_path("base", None, "import: base model of an adapter that does not name it", True),
        "shard_gb": flags.DEFINE_float("shard_gb", 5.0, "export: maximum size of a file, in GB", lower_bound=1e-6),
        "push": flags.DEFINE_string("push", None, "export: repository on the Hugging Face Hub to upload to, org/name"),
        "license": flags.DEFINE_string(
            "license", None, "export: license for the model card, as the hub names it: apache-2.0"
        ),
        "private": flags.DEFINE_bool("private", False, "--push: make a new repository private"),
    }
    command = Exchange(defined)
    cli.run(command.run, commands=("import", "export"))


class Exchange:
    """The command `pretrainax huggingface` with its flags."""

    def __init__(self, asked: Mapping[str, flags.FlagHolder]):
        self._flags = asked

    def __getitem__(self, flag: str):
        return self._flags[flag].value

    def run(self, command: str) -> int:
        workdir = cli.WORKDIR.value
        if not workdir:
            raise UserError(f"{command} needs --workdir=DIR")
        cli.check_overrides((), f"in an {command}")
        if command == "import":
            print(with_urls(self._import(workdir)))
            return 0
        if self["push"]:
            hub.check_push(self["push"])
        elif self["private"]:
            raise UserError("--private is for --push: give --push=org/name, or leave it out")
        with self._target() as to:
            print(with_urls(self._export(workdir, to)))
            if self["push"]:
                print(hub.push(to, self["push"], self["private"]))
        return 0

    def _import(self, workdir: str) -> str:
        given = [name for name in ("push", "license", "private") if self[name]]
        for name in given + ["config"] * (cli.CONFIG.value is not None):
            raise UserError(f"--{name} is for export: leave it out")
        directory = self["from"]
        if not directory:
            raise UserError("import needs --from=DIR")
        if is_adapter(local_path(directory)):
            return import_adapter(directory, self["base"], workdir)
        return import_directory(directory, workdir)

    @contextlib.contextmanager
    def _target(self) -> Iterator[str]:
        """Yields the folder into which the export is written: --to or, for a push without --to, a temporary folder."""
        if self["to"]:
            yield self["to"]
        elif self["push"]:
            with tempfile.TemporaryDirectory(prefix="export-") as folder:
                yield os.path.join(folder, self["push"].rpartition("/")[2])
        else:
            raise UserError("export needs --to=DIR, or --push=org/name")

    def _export(self, workdir: str, to: str) -> str:
        directory, selector = split_selector(workdir)
        step, size = self["step"], int(self["shard_gb"] * 1e9)
        if selector and step is not None:
            raise UserError(f"--workdir={workdir} and --step={step} both select a checkpoint: leave one out")
        origin = find_origin(workdir if step is None else f"{workdir}@{step}")
        if self["adapter"]:
            return self._export_adapter(directory, to, origin)
        recipe = self._recipe(origin)
        card = lambda folder: write_card(folder, origin, self._name(to), self["license"], recipe)  # noqa: E731
        return export_workdir(directory, to, origin.steps, self["dtype"], self["part"], size, origin.folder, card)

    def _export_adapter(self, directory: str, to: str, origin: Origin) -> str:
        if len(origin.steps) != 1:
            raise UserError(
                f"--adapter needs a single checkpoint of a run, and --workdir={cli.WORKDIR.value} is not one"
            )
        base = load_recorded_start(directory)
        if self["push"] and base.hub is None:
            raise UserError(
                f"--push --adapter: this run started from {base.description}, which others do not have: start a run "
                "from hf:org/name, or leave out --adapter to upload the whole model"
            )

        def card(folder: str) -> None:
            if base.hub is not None:
                write_card(folder, origin, self._name(to), self["license"], self._recipe(origin), base)

        return export_adapter(directory, to, origin.steps[0], origin.folder, card)

    def _name(self, to: str) -> str:
        return self["push"] or os.path.basename(os.path.abspath(to))

    def _recipe(self, origin: Origin) -> Optional[Recipe]:
        """Returns the run's config compared with the ledger of --config; None without --config or without a ledger."""
        if cli.CONFIG.value is None:
            return None
        compared = cli.compare_with_ledger(experiment_of(origin))
        return None if compared is None else Recipe(cli.config_name(), compared)


if __name__ == "__main__":
    main()
