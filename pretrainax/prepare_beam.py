"""Runs the preparation with Apache Beam: `python -m pretrainax.prepare_beam --config=... --runner=DirectRunner`.

Flags that PretrainAX does not define go to Beam and must have the form --name=value. On a cluster use
--runner=FlinkRunner, SparkRunner or DataflowRunner with the flags of that runner. The workers need this package and
must see the source files and `config.data.cache_dir` under the same paths. A task reads and tokenizes one shard. The
starting process trains the tokenizer and joins the shards. Install Beam with `pip install 'pretrainax[beam]'`.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pretrainax.config import UserError
from pretrainax.data.preparation.prepare import prepare

_OWN_FLAGS = ("config", "debug", "help")


class Pipeline:
    """Calls a function for each task (one shard of the dataset) in an Apache Beam pipeline."""

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


def _check(beam_flags: list[str]) -> None:
    """Raises UserError if Beam does not accept its flags, before the slow training of the tokenizer."""
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.runners.runner import create_runner

    try:
        with contextlib.redirect_stderr(io.StringIO()) as complaint:
            create_runner(PipelineOptions(beam_flags).get_all_options()["runner"] or "DirectRunner")
    except (ImportError, ValueError, AttributeError) as e:
        raise UserError(f"Beam cannot use these flags: {' '.join(str(e).split())}") from e
    except SystemExit as e:  # argparse has printed its usage, then the reason
        raise UserError(f"Beam cannot use these flags: {complaint.getvalue().splitlines()[-1]}") from e


def main() -> None:
    from pretrainax import cli  # it defines flags; workers also import this module, and need no flags

    beam_flags = [a for a in sys.argv[1:] if a.lstrip("-").split("=")[0].split(".")[0] not in _OWN_FLAGS]
    sys.argv = [a for a in sys.argv if a not in beam_flags]

    def run() -> int:
        try:
            import apache_beam  # noqa: F401
        except ImportError as e:
            raise UserError("Apache Beam is not installed: pip install 'pretrainax[beam]'") from e
        _check(beam_flags)
        print(prepare(cli.experiment(), elsewhere=Pipeline(beam_flags)).summary)
        return 0

    cli.run(run)


if __name__ == "__main__":
    main()
