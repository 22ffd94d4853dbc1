"""Imports, exports and verifies Hugging Face models: `python -m pretrainax.huggingface export --workdir=RUN --to=DIR`.

    python -m pretrainax.huggingface import --from=DIR --workdir=DIR
    python -m pretrainax.huggingface verify --from=DIR [--workdir=RUN] [--base=DIR]
    python -m pretrainax.huggingface export --workdir=RUN --to=DIR [--dtype=bfloat16] [--part=generator] [--adapter]
    python -m pretrainax.huggingface export --workdir=RUN --push=org/name [--to=DIR] [--license=mit] [--private]

Imports and exports never load the whole model into memory. RUN selects the parameters to export:

    RUN           the newest checkpoint of a run
    RUN@2000      step 2000; equivalent to --step=2000
    RUN@best      the best checkpoint
    RUN@average   the mean of the last checkpoints; RUN@average5: of the newest 5
    RUN@ema       the moving average of the parameters
    RUN@trained   the trained parameters

Without @ema or @trained, an export contains the parameters that the run validates.

A Hugging Face directory contains config.json, safetensors files (one, or several with an index) and a tokenizer.
--from=hf:org/name, or hf:org/name@revision, selects a model of the Hugging Face Hub. Only these files are downloaded,
into the cache of the Hugging Face libraries.

An import creates a workdir, which can be evaluated, exported, and used to initialize runs:
`--config.checkpoint.init_from` takes the workdir, the directory or hf:org/name. A model without heads (a BertModel)
cannot be imported, but can initialize a run with `--config.checkpoint.fresh_heads=True`. Imports and exports of
bfloat16 tensors are exact. An export contains manifest.sha256; an import checks this file if it exists.

An export contains a model card, README.md, generated from the run's folder. --license sets the license in the
card. --config=NAME, the config of the run, adds the source of each number to the card. --push uploads the export as one
commit, as the user of the token (`hf auth login`, HF_TOKEN). --private makes a new repository private.

For a run with `config.tuning`, an export contains the merged model. With --adapter, it contains only the trained
parameters, in the format of PEFT. An import also reads adapter directories; --base=DIR is the base model of the
adapter. With --adapter, a model card and --push are available only if the run started from a model on the Hub, because
other users do not have a local base model.

verify compares a directory in transformers with the same model in PretrainAX: ids of probe texts with special tokens,
config.json as transformers' own config class reads it, dtypes, start and end tokens, generation settings, the outputs
of all heads in float32, and 16 greedy tokens. Each line shows what was compared, the largest difference and its limit,
or why it was not compared. With --workdir=RUN, verify compares the directory with the run into which it was imported.
The exit status is 1 if a comparison differs. Each import and export does the same and prints one line if transformers
and torch are installed (`pip install 'pretrainax[parity]'`); --noverify leaves it out. If a model differs, --push
uploads nothing. The outputs are compared only if the machine has enough memory for the model; --nocheck_memory compares
them anyway.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Optional

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError
from pretrainax.files.paths import define_path
from pretrainax.interop.export_dtypes import EXPORT_DTYPES
from pretrainax.storage import hub
from pretrainax.storage.places import local_path, with_urls

if TYPE_CHECKING:  # the methods import the rest, because JAX takes seconds, for which --help must not wait
    from pretrainax.interop.origin import Origin
    from pretrainax.runs.model_card import Recipe

_EXPORT_FLAGS = ("to", "step", "dtype", "part", "adapter", "shard_gb", "push", "license", "private", "config", "verify")
_FLAGS = {"import": ("from", "base", "verify"), "export": _EXPORT_FLAGS, "verify": ("from", "base")}


def main() -> None:
    """Defines the flags and runs the command.

    The flags are not defined on import, because other commands define flags with the same names.
    """
    command_flags = {
        "from": define_path("from", None, "import, verify: Hugging Face directory or hf:org/name[@revision]", True),
        "to": define_path("to", None, "export: folder to create"),
        "step": flags.DEFINE_integer("step", None, "export: step of the checkpoint; by default the newest"),
        "dtype": flags.DEFINE_enum(
            "dtype", None, list(EXPORT_DTYPES), "export: dtype of the tensors; by default as imported, or float32"
        ),
        "part": flags.DEFINE_enum(
            "part", None, ["discriminator", "generator"], "export: part of an ELECTRA model; by default discriminator"
        ),
        "adapter": flags.DEFINE_bool(
            "adapter", False, "export: only the trained parameters of config.tuning, for peft"
        ),
        "base": define_path("base", None, "import, verify: base model of an adapter that does not name it", True),
        "shard_gb": flags.DEFINE_float("shard_gb", 5.0, "export: maximum size of a file, in GB", lower_bound=1e-6),
        "push": flags.DEFINE_string("push", None, "export: repository on the Hugging Face Hub to upload to, org/name"),
        "license": flags.DEFINE_string(
            "license", None, "export: license for the model card, as the hub names it: apache-2.0"
        ),
        "private": flags.DEFINE_bool("private", False, "export: make the new repository of --push private"),
        "verify": flags.DEFINE_bool("verify", True, "import, export: compare the model with transformers"),
        "check_memory": flags.DEFINE_bool(
            "check_memory", True, "Compare outputs with transformers only if the machine has enough memory"
        ),
    }
    command = Exchange(command_flags)
    cli.run(command.run, commands=_FLAGS)


class Exchange:
    """Implements the command `pretrainax huggingface`."""

    def __init__(self, asked: Mapping[str, flags.FlagHolder]):
        self._flags = asked

    def __getitem__(self, flag: str):
        return self._flags[flag].value

    def run(self, command: str) -> int:
        """Imports, exports or verifies a model; `command` is the name of the subcommand. Returns the exit code."""
        workdir = cli.WORKDIR.value
        cli.check_overrides((), f"in {command}")
        if command != "export" and not self["from"]:
            raise UserError(f"{command} needs --from=DIR")
        if command == "verify":
            return self._verify(workdir)
        if not workdir:
            raise UserError(f"{command} needs --workdir=DIR")
        if command == "import":
            from pretrainax.runs import next_steps

            print(with_urls(self._import(workdir)))
            differs = self._compare(self["from"], workdir, self["base"])
            print(next_steps.after_import(workdir), file=sys.stderr)
            return int(differs)
        if self["push"]:
            hub.check_push(self["push"])
        elif self["private"]:
            raise UserError("--private is for --push: give --push=org/name, or leave it out")
        with self._target() as to:
            print(with_urls(self._export(workdir, to)))
            run = workdir if self["step"] is None else f"{workdir}@{self['step']}"
            if self._compare(to, run if self["adapter"] else None):
                print(f"{to} differs in transformers{': nothing was uploaded' if self['push'] else ''}")
                return 1
            if self["push"]:
                print(hub.push(to, self["push"], self["private"]))
        return 0

    def _verify(self, workdir: Optional[str]) -> int:
        """Compares the model in --from with transformers and prints all comparisons. Returns the exit code."""
        from pretrainax.inference.verification import verify

        result = verify(self["from"], model=workdir, base=self["base"], check_memory=self["check_memory"])
        print(with_urls(result.table()))
        return int(result.differs)

    def _compare(self, directory: str, model: Optional[str], base: Optional[str] = None) -> bool:
        """Compares an imported or exported model with transformers, and prints one line; returns whether it differs.

        A comparison that is not possible, or fails, does not make the command fail.

        Args:
          directory: the Hugging Face or PEFT directory.
          model: the run that PretrainAX loads, or None to load `directory`.
          base: base model of an adapter.
        """
        if not self["verify"]:
            return False
        from pretrainax.inference.verification import verify

        try:
            result = verify(directory, model=model, base=base, check_memory=self["check_memory"])
        except Exception as e:  # a mistake, or a failure of transformers, torch or peft
            print(f"not verified: {cli.describe_error(e)}")
            return False
        print(with_urls(result.table() if result.differs else result.summary()))
        return result.differs

    def _import(self, workdir: str) -> str:
        from pretrainax.interop.adapters import import_adapter, is_adapter
        from pretrainax.interop.directories import import_directory

        directory = self["from"]
        if is_adapter(local_path(directory)):
            return import_adapter(directory, self["base"], workdir)
        return import_directory(directory, workdir)

    @contextlib.contextmanager
    def _target(self) -> Iterator[str]:
        """Yields the folder for the export: --to, or a temporary folder for a push without --to."""
        if self["to"]:
            yield self["to"]
        elif self["push"]:
            with tempfile.TemporaryDirectory(prefix="export-") as folder:
                yield os.path.join(folder, self["push"].rpartition("/")[2])
        else:
            raise UserError("export needs --to=DIR, or --push=org/name")

    def _export(self, workdir: str, to: str) -> str:
        """Exports the model that `workdir` selects, with a model card, to the folder `to`. Returns a summary line."""
        from pretrainax.interop.directories import export_workdir
        from pretrainax.interop.origin import find_origin, split_selector
        from pretrainax.runs.model_card import write_card

        directory, selector = split_selector(workdir)
        step, max_shard_bytes = self["step"], int(self["shard_gb"] * 1e9)
        if selector and step is not None:
            raise UserError(f"--workdir={workdir} and --step={step} both select a checkpoint: leave one out")
        origin = find_origin(workdir if step is None else f"{workdir}@{step}")
        if not origin.steps:
            raise UserError(f"--workdir={workdir} is a Hugging Face directory, and export takes the folder of a run")
        if self["adapter"]:
            return self._export_adapter(directory, to, origin)
        recipe = self._recipe(origin)
        card = lambda folder: write_card(folder, origin, self._model_name(to), self["license"], recipe)  # noqa: E731
        return export_workdir(
            directory, to, origin.steps, self["dtype"], self["part"], max_shard_bytes, origin.folder, card
        )

    def _export_adapter(self, directory: str, to: str, origin: "Origin") -> str:
        """Exports the trained parameters of a run with config.tuning as a PEFT adapter. Returns a summary line."""
        from pretrainax.interop.adapters import export_adapter
        from pretrainax.interop.start import experiment_of, load_recorded_start
        from pretrainax.runs.model_card import write_card

        if len(origin.steps) != 1:
            raise UserError(
                f"--adapter needs a single checkpoint of a run, and --workdir={cli.WORKDIR.value} is not one"
            )
        for name in ("dtype", "part", "shard_gb"):
            if self._flags[name].present:
                raise UserError(f"--{name} has no effect with --adapter: leave one of them out")
        if experiment_of(origin).tuning is None:
            raise UserError(f"--adapter is for runs with config.tuning, which {directory} does not have: leave it out")
        base = load_recorded_start(directory)
        if self["push"] and base.hub is None:
            raise UserError(
                f"--push --adapter: this run started from {base.description}, which others do not have: start a run "
                "from hf:org/name, or leave out --adapter to upload the whole model"
            )

        def card(folder: str) -> None:
            if base.hub is not None:
                write_card(folder, origin, self._model_name(to), self["license"], self._recipe(origin), base)

        return export_adapter(directory, to, origin.steps[0], origin.folder, card)

    def _model_name(self, to: str) -> str:
        return self["push"] or os.path.basename(os.path.abspath(to))

    def _recipe(self, origin: "Origin") -> Optional["Recipe"]:
        """Compares the run's config with the ledger of the config that --config names.

        Returns None if --config is not set, or if its config has no ledger.
        """
        from pretrainax.interop.start import experiment_of
        from pretrainax.runs.model_card import Recipe

        if cli.CONFIG.value is None:
            return None
        comparison = cli.compare_with_ledger(experiment_of(origin))
        return None if comparison is None else Recipe(cli.config_name(), comparison)


if __name__ == "__main__":
    main()
