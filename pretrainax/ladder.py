"""Predicts a large run from small ones: `python -m pretrainax.ladder FILE.toml --workdir=DIR [--go]`.

FILE.toml names a config, widths and amounts of text (docs/how-to/ladder.md). The command checks the file, prepares the
data, times short runs of each size, and prints the runs, their FLOPs and hours. `--go` then starts the ladder: for
each size it trains a trunk at a constant learning rate and branches that decay from it, fits L(N, D) to the final
losses with intervals, and writes law.json, report.md, report.json and law.png. If the file names a held-out run, the
ladder writes prediction.json and its SHA-256 before this run starts, and score.json afterwards.

`plan --law=DIR` uses the law. The same command continues a ladder after any interruption, and several
processes can share a --workdir.

Exit codes: 0 done, 1 failed, 2 invalid file, config or input, 75 interrupted by a signal (run the same command again).
"""

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError


def main() -> None:
    """Defines the flags and runs the command.

    The flag is not defined on import, because another command defines a flag with the same name.
    """
    go = flags.DEFINE_bool("go", False, "Start or continue the ladder; without this flag, only print the estimate")

    def run(*files: str) -> int:
        if len(files) != 1:
            raise UserError(f"give one ladder file: pretrainax ladder FILE.toml --workdir=DIR; got {len(files)}")
        if not cli.WORKDIR.value:
            raise UserError("--workdir is missing: the folder of the ladder")
        from pretrainax.studies.command import run_command  # local imports: import JAX
        from pretrainax.studies.ladder import command

        def start(workdir: str) -> int:
            return command.run(files[0], workdir, go.value)

        return run_command("ladder", cli.WORKDIR.value, go.value, start)

    cli.run(run, texts=True, trains=True, run_flags=("workdir",))


if __name__ == "__main__":
    main()
