"""Hugging Face directories and models of the hub, both ways, without ever holding a model in memory.

    python -m pretrainax.huggingface import --from=DIR --workdir=DIR
    python -m pretrainax.huggingface export --workdir=RUN --to=DIR [--dtype=bfloat16] [--part=generator] [--adapter]
    python -m pretrainax.huggingface export --workdir=RUN --push=org/name [--to=DIR] [--license=mit] [--private]

RUN is the folder of a run, for its newest checkpoint, or RUN@2000 (as `--step=2000` says too), RUN@best, RUN@average
(the mean of all that are kept; RUN@average5: of the newest 5), RUN@ema (the moving average of the parameters) or
RUN@trained (as they were trained); without the last two it has those that the run validates.

A directory is config.json, safetensors files (one, or several and an index) and a tokenizer. --from=hf:org/name, or
hf:org/name@revision, is a model of the Hugging Face Hub: such files of it, and no others, are fetched into the cache
that other programs use, too. An import gives a workdir that evaluates, exports, and starts runs:
`--config.checkpoint.init_from` takes it, or the directory, or hf:org/name. A model without heads (a BertModel) is no
import: a run starts from it with `--config.checkpoint.fresh_heads=True`. An import of bfloat16 tensors is exact, and so
is their export; an export has a manifest.sha256, which an import checks where it is there.

An export has a model card, README.md, made of what the run's folder says; --license is what it is given under, and
--config=NAME, the config that the run was made by, lets the card say where each number comes from. --push sends it to
the hub, as the user whose token is set (`hf auth login`, HF_TOKEN), as one commit; --private if that makes a new
repository, it is nobody else's to see.

Of a run with `config.tuning` an export is of the merged model; with --adapter it is what was trained, in the format of
the library peft. An import reads such a directory too; --base=DIR is the model that it is for. Where the run has
started from a model of the hub, the adapter has a card and can be pushed; nobody else has another model.
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
from pretrainax.interop.origin import Origin, find_origin, parted
from pretrainax.interop.start import experiment_of, find_known_start
from pretrainax.runs.model_card import Recipe, write_card
from pretrainax.storage import hub
from pretrainax.storage.places import here, named


def main() -> None:
    """Defines the flags, and runs the command: here, as other commands have flags of the same names."""
    asked = {
        "from": define_path("from", None, "import: the Hugging Face directory, or hf:org/name[@revision]", True),
        "to": define_path("to", None, "export: the directory to make"),
        "step": flags.DEFINE_integer("step", None, "export: the checkpoint; the newest where not given"),
        "dtype": flags.DEFINE_enum("dtype", None, list(DTYPES), "export: as they were imported, else float32"),
        "part": flags.DEFINE_enum(
            "part", "discriminator", ["discriminator", "generator"], "export: of a model that has two"
        ),
        "adapter": flags.DEFINE_bool("adapter", False, "export: of a run under tuning, what it has trained, for peft"),
        "base": define_path("base", None, "import: the model that an adapter is for, if it does not name it", True),
        "shard_gb": flags.DEFINE_float("shard_gb", 5.0, "export: a file's size at most", lower_bound=1e-6),
        "push": flags.DEFINE_string("push", None, "export: org/name on the Hugging Face Hub, to send it to"),
        "license": flags.DEFINE_string("license", None, "export: as the hub names it, apache-2.0; for the model card"),
        "private": flags.DEFINE_bool("private", False, "--push: a repository that is made for it is private"),
    }
    command = Exchange(asked)
    cli.run(command.run, commands=("import", "export"))


class Exchange:
    """Does what the flags ask for."""

    def __init__(self, asked: Mapping[str, flags.FlagHolder]):
        self._asked = asked

    def __getitem__(self, flag: str):
        return self._asked[flag].value

    def run(self, command: str) -> int:
        workdir = cli.WORKDIR.value
        if not workdir:
            raise UserError(f"{command} needs --workdir=DIR")
        cli.check_overrides((), f"in an {command}")
        if command == "import":
            print(named(self._import(workdir)))
            return 0
        if self["push"]:
            hub.check_push(self["push"])
        elif self["private"]:
            raise UserError("--private is of a push: give --push=org/name, or leave it out")
        with self._target() as to:
            print(named(self._export(workdir, to)))
            if self["push"]:
                print(hub.push(to, self["push"], self["private"]))
        return 0

    def _import(self, workdir: str) -> str:
        given = [name for name in ("push", "license", "private") if self[name]]
        for name in given + ["config"] * (cli.CONFIG.value is not None):
            raise UserError(f"--{name} is of an export: leave it out")
        directory = self["from"]
        if not directory:
            raise UserError("import needs --from=DIR")
        if is_adapter(here(directory)):
            return import_adapter(directory, self["base"], workdir)
        return import_directory(directory, workdir)

    @contextlib.contextmanager
    def _target(self) -> Iterator[str]:
        """Yields the folder to write; of a push without one that is of no further use."""
        if self["to"]:
            yield self["to"]
        elif self["push"]:
            with tempfile.TemporaryDirectory(prefix="export-") as folder:
                yield os.path.join(folder, self["push"].rpartition("/")[2])
        else:
            raise UserError("export needs --to=DIR, or --push=org/name")

    def _export(self, workdir: str, to: str) -> str:
        directory, which = parted(workdir)
        step, size = self["step"], int(self["shard_gb"] * 1e9)
        if which and step is not None:
            raise UserError(f"--workdir={workdir} and --step={step} both name a checkpoint: leave one out")
        origin = find_origin(workdir if step is None else f"{workdir}@{step}")
        if self["adapter"]:
            return self._export_adapter(directory, to, origin)
        recipe = self._recipe(origin)
        card = lambda folder: write_card(folder, origin, self._name(to), self["license"], recipe)  # noqa: E731
        return export_workdir(directory, to, origin.steps, self["dtype"], self["part"], size, origin.folder, card)

    def _export_adapter(self, directory: str, to: str, origin: Origin) -> str:
        if len(origin.steps) != 1:
            raise UserError(f"--adapter is of one checkpoint of a run, and --workdir={cli.WORKDIR.value} names no one")
        base = find_known_start(directory)
        if self["push"] and base.hub is None:
            raise UserError(
                f"--push --adapter: this run has started from {base.description}, which others do not have: start one "
                "from hf:org/name, or leave out --adapter, to send the whole model"
            )

        def card(folder: str) -> None:
            if base.hub is not None:
                write_card(folder, origin, self._name(to), self["license"], self._recipe(origin), base)

        return export_adapter(directory, to, origin.steps[0], origin.folder, card)

    def _name(self, to: str) -> str:
        return self["push"] or os.path.basename(os.path.abspath(to))

    def _recipe(self, origin: Origin) -> Optional[Recipe]:
        """Returns the config of --config beside its ledger, with the numbers of the run; None where none is given."""
        if cli.CONFIG.value is None:
            return None
        compared = cli.compare_with_ledger(experiment_of(origin))
        return None if compared is None else Recipe(cli.config_name(), compared)


if __name__ == "__main__":
    main()
