"""Predicts a large run from small ones: `python -m pretrainax.ladder FILE.toml --workdir=DIR [--go]`.

FILE.toml names a config, widths and amounts of text (docs/how-to/ladder.md). The command checks the file, prepares the
data, times a short run of each size, and prints the runs, their FLOPs and hours. `--go` then starts the ladder: for
each size it trains a trunk at a constant learning rate and branches that decay from it, fits L(N, D) to the final
losses with intervals, and writes law.json, report.md, report.json and law.png. If the file names a held-out run, the
ladder writes prediction.json and its SHA-256 before this run starts, and score.json afterwards.

`plan --law=DIR` uses the law. The same command continues a ladder after any interruption, and several
processes can share a --workdir.

Exit codes: 0 done, 1 failed, 2 invalid file, config or input, 75 interrupted by a signal (run the same command again).
"""

import shlex
import sys

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError
from pretrainax.runtime.signals import PREEMPTED


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
        import jax

        from pretrainax.studies.command import local_workdir
        from pretrainax.studies.ladder import command

        # The worker uses the devices; this process only counts FLOPs and fits.
        jax.config.update("jax_platforms", "cpu")
        with local_workdir(cli.WORKDIR.value) as workdir:
            code = command.run(files[0], workdir, go.value)
        words = shlex.join(["pretrainax", "ladder", *sys.argv[1:]])
        if code == PREEMPTED:
            print(f"to resume: {words}", file=sys.stderr)
        elif not go.value:
            print(f"to start: {words} --go", file=sys.stderr)
        return code

    cli.run(run, config=lambda: None, texts=True, trains=True)


if __name__ == "__main__":
    main()
