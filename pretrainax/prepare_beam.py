"""Runs data preparation with Apache Beam: `python -m pretrainax.prepare_beam --config=... --runner=DirectRunner`.

Flags that PretrainAX does not define are passed to Beam and must have the form --name=value. On a cluster, use
--runner=FlinkRunner, SparkRunner or DataflowRunner with that runner's flags. The workers need this package and must see
the source files and `config.data.cache_dir` under the same paths. Each Beam task reads and tokenizes one shard; the
command's own process trains the tokenizer and joins the shards. Install Beam with `pip install 'pretrainax[beam]'`.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pretrainax.config import UserError
from pretrainax.data.preparation.prepare import prepare
from pretrainax.files.extras import import_extra


class Pipeline:
    """Calls a function once per task in an Apache Beam pipeline; a task holds the arguments for one token shard."""

    def __init__(self, beam_flags: list[str]):
        self._flags = beam_flags

    def __call__(self, function: Callable, tasks: list[tuple]) -> Iterator[None]:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

        def call(task: tuple) -> Any:
            return function(*task)

        with beam.Pipeline(options=PipelineOptions(self._flags)) as pipeline:
            pipeline | beam.Create(tasks) | beam.Reshuffle() | beam.Map(call)
        yield from (None for _ in tasks)


def _check_beam_flags(beam_flags: list[str]) -> None:
    """Raises UserError if Beam rejects its flags; called before the tokenizer is trained, which is slow."""
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.runners.runner import create_runner

    try:
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            create_runner(PipelineOptions(beam_flags).get_all_options()["runner"] or "DirectRunner")
    except (ImportError, ValueError, AttributeError) as e:
        raise UserError(f"Beam cannot use these flags: {' '.join(str(e).split())}") from e
    except SystemExit as e:  # argparse prints its usage, then the reason
        raise UserError(f"Beam cannot use these flags: {stderr.getvalue().splitlines()[-1]}") from e


def main() -> None:
    from pretrainax import cli  # local import: cli defines flags, and loader workers import this module without flags

    own_flags = ("config", *cli.COMMON_FLAGS, cli.COMPLETE.lstrip("-"), "help")
    beam_flags = [a for a in sys.argv[1:] if a.lstrip("-").split("=")[0].split(".")[0] not in own_flags]
    sys.argv = [a for a in sys.argv if a not in beam_flags]

    def run() -> int:
        import_extra("apache_beam", "beam", "prepare_beam")
        _check_beam_flags(beam_flags)
        print(prepare(cli.experiment(), elsewhere=Pipeline(beam_flags)).summary)
        return 0

    cli.run(run, run_flags=("config",))


if __name__ == "__main__":
    main()
