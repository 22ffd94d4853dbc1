"""`python -m pretrainax.tokenizer`: learn a tokenizer, choose its kind and size, look at what it does.

    python -m pretrainax.tokenizer train --config=FILE [--to=DIR]
    python -m pretrainax.tokenizer report --config=FILE [--sizes=8000,32000,50000] [--kinds=unigram,bpe,…] [--to=DIR]
    python -m pretrainax.tokenizer encode --tokenizer=DIR [--text=TEXT]

`train` makes config.tokenizer from config.data.source, as the preparation of a run does, and saves it. `report` learns
each kind at each size from config.tokenizer.train_bytes of the training text and measures it on validation text; DIR
gets report.md, report.json and report.png. `encode` shows how a text is split: --text, or what comes from stdin.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Optional

from pretrainax.config import Experiment, UserError, nearest
from pretrainax.data.preparation.tokenizer import prepare_tokenizer, sample_split
from pretrainax.files.paths import define_path
from pretrainax.storage.places import here
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.compare import KINDS, compare, measure, table, write_report
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.segmentation import describe_segmentation

_TRAINED = 10_000_000  # bytes to learn from, where config.tokenizer does not say
_MEASURED = 4_000_000  # bytes of validation text, at most


def train(experiment: Experiment, directory: Optional[str]) -> str:
    """Makes or finds the tokenizer of a config, and saves it; returns a line about it."""
    started = time.perf_counter()
    tokenizer = prepare_tokenizer(experiment)
    seconds = time.perf_counter() - started
    text = sample_split(experiment, "valid", _MEASURED)
    bytes_per_token = measure(tokenizer, text)["bytes_per_token"]
    said = (
        f"{type(experiment.tokenizer).__name__} of {tokenizer.vocabulary.size:,} ids: "
        f"{bytes_per_token:.3f} bytes per token on {sum(len(t.encode()) for t in text) / 1e6:.2f} MB of "
        f"validation text; made in {seconds:.1f} s"
    )
    if directory is None:
        return f"{said}; kept in {experiment.data.cache_dir}"
    tokenizer.save(directory)
    return f"{said}; saved to {directory}"


def report(experiment: Experiment, kinds: Sequence[str], sizes: Sequence[int], directory: Optional[str]) -> str:
    """Compares kinds and sizes; returns the table."""
    training = sample_split(experiment, "train", experiment.tokenizer.train_bytes or _TRAINED)
    held_out = sample_split(experiment, "valid", _MEASURED)
    costs = functools.partial(model_costs, experiment)
    results = compare(experiment.tokenizer, training, held_out, kinds, sizes, costs)
    if directory is not None:
        write_report(results, directory)
    return table(results)


def model_costs(experiment: Experiment, tokenizer: Tokenizer, bytes_per_token: float) -> dict[str, float]:
    """Returns what config.model costs with as many rows as there are ids.

    That is the parameters of its tables, and training FLOPs a byte of text: more ids make the softmax dearer and the
    text shorter.
    """
    from pretrainax.models.flops import flops_per_step  # here: it imports JAX

    model = dataclasses.replace(experiment.model, vocab_size=tokenizer.vocabulary.size)
    lengths = experiment.objective.lengths(experiment.data.sequence_length)
    tables = 1 if model.tie_embeddings else 2
    return {
        "embedding_parameters": tables * model.vocab_size * model.embedding_width,
        "flops_per_byte": flops_per_step(model, 1, lengths.inputs, lengths.targets) / (lengths.raw * bytes_per_token),
    }


def main() -> None:
    from absl import flags

    from pretrainax import cli

    target = define_path("to", None, "train, report: the directory to write")
    sizes = flags.DEFINE_list("sizes", ["4000", "8000", "16000", "32000", "50000"], "report: values of vocab_size")
    kinds = flags.DEFINE_list("kinds", list(KINDS), "report: of tokenizers")
    directory = define_path(
        "tokenizer", None, "encode: a saved one, a Hugging Face directory, hf:org/name", takes_hub=True
    )
    text = flags.DEFINE_string("text", None, "encode: the text; from stdin where not given")

    def run(command: str) -> int:
        to = target.value and cli.folder("to", target.value)
        if command == "train":
            print(train(cli.experiment(), to))
        elif command == "report":
            for kind in set(kinds.value) - set(KINDS):
                raise UserError(f"--kinds has {kind!r}, {nearest(kind, KINDS)}")
            for size in sizes.value:
                if not size.isdecimal() or not int(size):
                    raise UserError(f"--sizes has {size!r}, it must be whole numbers above 0, as 8000,32000")
            print(report(cli.experiment(), kinds.value, [int(size) for size in sizes.value], to), end="")
        elif not directory.value:
            raise UserError("encode needs --tokenizer=DIR")
        else:
            said = sys.stdin.read() if text.value is None else text.value
            print(describe_segmentation(read_tokenizer(here(directory.value)), said))
        return 0

    cli.run(run, commands=("train", "report", "encode"))


if __name__ == "__main__":
    main()
