"""Trains, compares and tests tokenizers: `python -m pretrainax.tokenizer train --config=FILE --to=DIR`.

    python -m pretrainax.tokenizer train --config=FILE [--to=DIR]
    python -m pretrainax.tokenizer report --config=FILE [--sizes=8000,32000,50000] [--kinds=unigram,bpe,…] [--to=DIR]
    python -m pretrainax.tokenizer encode --tokenizer=DIR [--text=TEXT]

`train` trains the tokenizer of config.tokenizer on config.data.source, as a run does before its first step, and saves
it. `report` trains a tokenizer of each kind and vocabulary size on config.tokenizer.train_bytes bytes of the training
split, and measures it on the validation split. It writes report.md, report.json and report.png to --to. `encode` prints
the tokens of --text, or of stdin.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Optional

from pretrainax.config import Experiment, UserError, nearest
from pretrainax.data.preparation.tokenizer import prepare_tokenizer, sample_split
from pretrainax.files.outputs import output_folder
from pretrainax.files.paths import define_path
from pretrainax.storage.places import local_path
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.compare import KINDS, compare, measure, table, write_report
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.tokenization.segmentation import describe_segmentation

_TRAINING_BYTES = 10_000_000  # bytes of training text for `report` if config.tokenizer.train_bytes is None or 0
_VALIDATION_BYTES = 4_000_000  # maximum bytes of validation text
_FLAGS = {"train": ("config", "to"), "report": ("config", "to", "sizes", "kinds"), "encode": ("tokenizer", "text")}


def train(experiment: Experiment, directory: Optional[str]) -> str:
    """Trains the tokenizer of a config, or loads it from the cache. Returns a summary line.

    directory: folder for the tokenizer. If None, the tokenizer is saved only in the cache.
    """
    start_time = time.perf_counter()
    tokenizer = prepare_tokenizer(experiment)
    seconds = time.perf_counter() - start_time
    documents = sample_split(experiment, "valid", _VALIDATION_BYTES)
    bytes_per_token = measure(tokenizer, documents)["bytes_per_token"]
    summary = (
        f"{type(experiment.tokenizer).__name__} of {tokenizer.vocabulary.size:,} ids: "
        f"{bytes_per_token:.3f} bytes per token on {sum(len(d.encode()) for d in documents) / 1e6:.2f} MB of "
        f"validation text; made in {seconds:.1f} s"
    )
    if directory is None:
        return f"{summary}; saved in {experiment.data.cache_dir}"
    tokenizer.save(directory)
    return f"{summary}; saved to {directory}"


def report(experiment: Experiment, kinds: Sequence[str], sizes: Sequence[int], directory: Optional[str]) -> str:
    """Trains a tokenizer of each kind at each vocabulary size and compares them. Returns the table of results.

    directory: folder for the report. If None, no report is written.
    """
    training = sample_split(experiment, "train", experiment.tokenizer.train_bytes or _TRAINING_BYTES)
    held_out = sample_split(experiment, "valid", _VALIDATION_BYTES)
    costs = functools.partial(model_costs, experiment)
    results = compare(experiment.tokenizer, training, held_out, kinds, sizes, costs)
    if directory is not None:
        write_report(results, directory)
    return table(results)


def model_costs(experiment: Experiment, tokenizer: Tokenizer, bytes_per_token: float) -> dict[str, float]:
    """Computes what a tokenizer's vocabulary costs: embedding parameters, and training FLOPs per byte of text.

    The costs are those of config.model with this vocabulary. A larger vocabulary makes the softmax more expensive but
    shortens the token sequences.

    Args:
      bytes_per_token: mean number of bytes of text per token.
    """
    from pretrainax.models.flops import flops_per_step  # local import, because it imports JAX

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

    target = define_path("to", None, "train: folder for the tokenizer; report: folder for the report")
    sizes = flags.DEFINE_list(
        "sizes", ["4000", "8000", "16000", "32000", "50000"], "report: vocabulary sizes to compare"
    )
    kinds = flags.DEFINE_list("kinds", list(KINDS), "report: kinds of tokenizers to compare")
    directory = define_path(
        "tokenizer", None, "encode: saved tokenizer, Hugging Face directory or hf:org/name", takes_hub=True
    )
    text = flags.DEFINE_string("text", None, "encode: text to tokenize; by default the text from stdin")

    def run(command: str) -> int:
        to = target.value and output_folder("to", target.value)
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
            content = sys.stdin.read() if text.value is None else text.value
            print(describe_segmentation(read_tokenizer(local_path(directory.value)), content))
        return 0

    cli.run(run, commands=_FLAGS, run_flags=("config",))


if __name__ == "__main__":
    main()
