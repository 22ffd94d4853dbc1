"""From a source of text to a tokenizer and token shards in the cache: `python -m pretrainax.prepare --config=...`.

Training does the same first. What is in the cache under the same fingerprint is used as it is; a run that was killed
goes on with the shards that are missing.

Past one machine, all machines see the same files and the same `config.data.cache_dir`. Each of n jobs (a SLURM array,
an indexed Kubernetes job) writes its share of the shards with `--shard=i/n`, i from 0. When all have ended, one call
without `--shard`, or the training, joins them and writes what is missing. The jobs need no locks of a shared file
system: each has shards of its own, and those that find no tokenizer train the same one. `pretrainax.prepare_beam` does
it with Apache Beam. However many they are, the files come out the same, byte for byte.
"""

from pretrainax.config import UserError
from pretrainax.data.inspection.corpus_files import write_report
from pretrainax.data.preparation.prepare import prepare, prepare_share
from pretrainax.files.paths import define_path


def main() -> None:
    from absl import flags

    from pretrainax import cli  # defines flags: not in the workers, which import this module too

    shard = flags.DEFINE_string("shard", None, "i/n: only every n-th shard, from number i (0 to n - 1) on")
    folder = define_path("report", None, "Folder for a report of the corpus: a table, its figures, a picture")

    def run() -> int:
        experiment = cli.experiment()
        if shard.value and folder.value:
            raise UserError("--report needs all shards: give it to the call without --shard")
        if shard.value:
            print(prepare_share(experiment, *_share(shard.value)))
            return 0
        directory = folder.value and cli.folder("report", folder.value)
        prepared = prepare(experiment)
        print(write_report(prepared, directory) if directory else prepared.summary)
        return 0

    cli.run(run)


def _share(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise UserError(f"--shard is {text!r}, it must be i/n with i from 0 to n - 1, as 0/8")
    return int(index), int(count)


if __name__ == "__main__":
    main()
