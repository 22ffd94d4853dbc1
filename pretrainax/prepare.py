"""Tokenizes the dataset of a config into the cache: `python -m pretrainax.prepare --config=...`.

Writes the tokenizer and the token shards. Training does the same before its first step. Cached shards with the same
fingerprint are reused, so an interrupted preparation continues with the missing shards.

To use several machines, all of them must see the same files and the same `config.data.cache_dir`. Each of n jobs (a
SLURM array, an indexed Kubernetes job) writes every n-th shard with `--shard=i/n`, where i is 0 to n - 1. After all
jobs have ended, a call without `--shard`, or training itself, writes any missing shards and joins all shards. The jobs
need no file locks: they write different shards, and jobs that find no tokenizer train identical ones.
`pretrainax.prepare_beam` uses Apache Beam instead. The files are identical, byte for byte, for any number of jobs.
"""

from pretrainax.config import UserError
from pretrainax.data.inspection.corpus_report import write_report
from pretrainax.data.preparation.prepare import prepare, prepare_share
from pretrainax.files.outputs import output_folder
from pretrainax.files.paths import define_path


def main() -> None:
    from absl import flags

    from pretrainax import cli  # local import: cli defines flags, and loader workers import this module without flags

    shard = flags.DEFINE_string("shard", None, "i/n: write only every n-th shard, starting at shard i (0 to n - 1)")
    folder = define_path("report", None, "Folder for a report on the dataset: a table, the values as JSON, and a plot")

    def run() -> int:
        experiment = cli.experiment()
        if shard.value and folder.value:
            raise UserError("--report needs all shards: give it to the call without --shard")
        if shard.value:
            print(prepare_share(experiment, *_parse_shard(shard.value)))
            return 0
        directory = folder.value and output_folder("report", folder.value)
        prepared = prepare(experiment)
        print(write_report(prepared, directory) if directory else prepared.summary)
        return 0

    cli.run(run, run_flags=("config",))


def _parse_shard(text: str) -> tuple[int, int]:
    """Parses "i/n" into (i, n); raises UserError unless 0 <= i < n."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UserError(f"--shard is {text!r}, it must be i/n with i from 0 to n - 1, such as 0/8")
    return int(index), int(count)


if __name__ == "__main__":
    main()
