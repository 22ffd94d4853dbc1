"""Hugging Face directories, both ways, without ever holding a model in memory.

    python -m pretrainax.huggingface import --from=DIR --workdir=DIR
    python -m pretrainax.huggingface export --workdir=RUN --to=DIR [--dtype=bfloat16] [--part=generator] [--adapter]

RUN is the folder of a run, for its newest checkpoint, or RUN@2000 (as `--step=2000` says too), RUN@best, RUN@average
(the mean of all that are kept; RUN@average5: of the newest 5), RUN@ema (the moving average of the parameters) or
RUN@trained (as they were trained); without the last two it has those that the run validates.

A directory is config.json, safetensors files (one, or several and an index) and a tokenizer. It is local: nothing is
fetched, and nothing but safetensors, JSON and tokenizer files is opened. An import gives a workdir that evaluates,
exports, and starts runs: `--config.checkpoint.init_from` takes it, or the directory itself. A model without heads (a
BertModel) is no import: a run starts from it with `--config.checkpoint.fresh_heads=True`. An import of bfloat16
tensors is exact, and so is their export; an export has a manifest.sha256, which an import checks where it is there.

Of a run with `config.tuning` an export is of the merged model; with --adapter it is what was trained, in the format of
the library peft. An import reads such a directory too; --base=DIR is the model that it is for.
"""

from typing import Optional

from pretrainax.config import UserError
from pretrainax.config.paths import define_path
from pretrainax.interop.adapters import export_adapter, import_adapter, is_adapter
from pretrainax.interop.directories import DTYPES, export_workdir, import_directory
from pretrainax.interop.origin import find_origin, parted
from pretrainax.storage.places import here


def main() -> None:
    from absl import flags

    from pretrainax import cli

    source = define_path("from", None, "import: the Hugging Face directory, or hf:org/name", takes_hub=True)
    target = define_path("to", None, "export: the directory to make")
    step = flags.DEFINE_integer("step", None, "export: the checkpoint; the newest where not given")
    dtype = flags.DEFINE_enum("dtype", None, list(DTYPES), "export: as they were imported, else float32")
    part = flags.DEFINE_enum("part", "discriminator", ["discriminator", "generator"], "export: of a model that has two")
    adapter = flags.DEFINE_bool("adapter", False, "export: of a run under tuning, what it has trained, for peft")
    base = define_path("base", None, "import: the model that an adapter is for, if it does not name it", takes_hub=True)
    shard_gb = flags.DEFINE_float("shard_gb", 5.0, "export: a file's size at most", lower_bound=1e-6)

    def run(command: str) -> int:
        def flag(name: str, value: Optional[str]) -> str:
            if not value:
                raise UserError(f"{command} needs --{name}=DIR")
            return value

        workdir = flag("workdir", cli.WORKDIR.value)
        if command == "import":
            directory = flag("from", source.value)
            is_whole = not is_adapter(here(directory))
            print(import_directory(directory, workdir) if is_whole else import_adapter(directory, base.value, workdir))
        else:
            to, size = flag("to", target.value), int(shard_gb.value * 1e9)
            directory, which = parted(workdir)
            if which and step.value is not None:
                raise UserError(f"--workdir={workdir} and --step={step.value} both name a checkpoint: leave one out")
            origin = find_origin(workdir if step.value is None else f"{workdir}@{step.value}")
            if adapter.value:
                if len(origin.steps) != 1:
                    raise UserError(f"--adapter is of one checkpoint of a run, and --workdir={workdir} names no one")
                print(export_adapter(directory, to, origin.steps[0], origin.folder))
                return 0
            print(export_workdir(directory, to, origin.steps, dtype.value, part.value, size, origin.folder))
        return 0

    cli.run(run, commands=("import", "export"))


if __name__ == "__main__":
    main()
