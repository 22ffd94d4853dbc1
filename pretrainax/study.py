"""Compares ways to train with equal budgets: `python -m pretrainax.study FILE.toml --workdir=DIR [--go]`.

FILE.toml states a question, the arms to compare, the budget of each run, the tuning, the seeds and the measures
(docs/how-to/study.md). The command checks the file, prepares the data, times short runs of each arm, and prints the
number of runs, their FLOPs, hours and price. `--go` then starts the study: it tunes each arm with the same number of
trials, trains the final runs seed by seed with arms interleaved, computes the measures, and writes report.html,
report.md, report.json and findings.json.

The same command continues a study after any interruption. Several processes can share a study if they have the same
--workdir, which may also be a folder that several machines mount. After the start, only arms, measures, declared
contrasts and seeds can be added; the findings list these changes.

Exit codes: 0 done, 1 failed, 2 invalid file, config or input, 75 interrupted by a signal (run the same command again).
"""

from absl import flags

from pretrainax import cli
from pretrainax.config import UserError


def main() -> None:
    """Defines the flags and runs the command.

    The flags are not defined on import, because other commands define flags with the same names.
    """
    go = flags.DEFINE_bool("go", False, "Start or continue the study; without this flag, only print the estimate")
    topology = flags.DEFINE_string(
        "topology", None, "Machine whose hours and price to estimate, such as h100:8; default: budget.machine"
    )

    def run(*files: str) -> int:
        if len(files) != 1:
            raise UserError(f"give one study file, such as: pretrainax study FILE.toml --workdir=DIR; got {len(files)}")
        if not cli.WORKDIR.value:
            raise UserError("--workdir is missing: the folder of the study")
        from pretrainax.studies import command  # local import: imports JAX

        def start(workdir: str) -> int:
            return command.run(files[0], workdir, topology.value, go.value)

        return command.run_command("study", cli.WORKDIR.value, go.value, start)

    cli.run(run, texts=True, trains=True, run_flags=("workdir",))


if __name__ == "__main__":
    main()
