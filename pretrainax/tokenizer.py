"""`python -m pretrainax.tokenizer`: learn a tokenizer, choose its kind and size, look at what it does.

    python -m pretrainax.tokenizer train --config=FILE [--to=DIR]
    python -m pretrainax.tokenizer report --config=FILE [--sizes=8000,32000,50000] [--kinds=unigram,bpe,…] [--to=DIR]
    python -m pretrainax.tokenizer encode --tokenizer=DIR [--text=TEXT]

`train` makes config.tokenizer from config.data.source, as the preparation of a run does, and saves it. `report` learns
each kind at each size from config.tokenizer.train_bytes of the training text and measures it on validation text; DIR
gets report.md, report.json and report.png. `encode` shows how a text is split: --text, or what comes from stdin.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Optional

from pretrainax.config import Experiment, UserError, nearest
from pretrainax.config.atomic_files import write_atomically
from pretrainax.data.preparation.prepare import prepare_tokenizer, sample
from pretrainax.reporting.tables import text_table
from pretrainax.tokenization import compare as tokenizer_report
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.compare import KINDS
from pretrainax.tokenization.huggingface import read_tokenizer

_TRAINED = 10_000_000  # bytes to learn from, where config.tokenizer does not say
_MEASURED = 4_000_000  # bytes of validation text, at most


def train(experiment: Experiment, directory: Optional[str]) -> str:
    """Makes or finds the tokenizer of a config, and saves it; returns a line about it."""
    started = time.perf_counter()
    tokenizer = prepare_tokenizer(experiment)
    seconds = time.perf_counter() - started
    text = sample(experiment, "valid", _MEASURED)
    figures = tokenizer_report.measure(tokenizer, text)
    said = (
        f"{type(experiment.tokenizer).__name__} of {tokenizer.vocabulary.size:,} ids: "
        f"{figures['bytes_per_token']:.3f} bytes per token on {sum(len(t.encode()) for t in text) / 1e6:.2f} MB of "
        f"validation text; made in {seconds:.1f} s"
    )
    if directory is None:
        return f"{said}; kept in {experiment.data.cache_dir}"
    tokenizer.save(directory)
    return f"{said}; saved to {directory}"


def report(experiment: Experiment, kinds: Sequence[str], sizes: Sequence[int], directory: Optional[str]) -> str:
    """Compares kinds and sizes; returns the table."""
    training = sample(experiment, "train", experiment.tokenizer.train_bytes or _TRAINED)
    held_out = sample(experiment, "valid", _MEASURED)
    results = tokenizer_report.compare(experiment, training, held_out, kinds, sizes)
    table = tokenizer_report.table(results)
    if directory is not None:
        from pretrainax.reporting.text_plots import draw_tokenizers  # here: matplotlib takes long to import

        os.makedirs(directory, exist_ok=True)
        for name, content in (("report.md", table), ("report.json", json.dumps(results, indent=1) + "\n")):
            write_atomically(os.path.join(directory, name), content)
        if results["rows"]:
            draw_tokenizers(os.path.join(directory, "report.png"), results)
    return table


def encode(tokenizer: Tokenizer, text: str) -> str:
    """A line for each token, or for those that make one character together, and one about all of them."""
    ids = tokenizer.encode(text).tolist()
    lines = [(" ".join(map(str, group)), _quoted(tokenizer.decode(group))) for group in _characters(tokenizer, ids)]
    size, back = len(text.encode()), tokenizer.decode(ids)
    ratio = f", {size / len(ids):.2f} a token" if ids else ""
    exact = "the text comes back exactly" if back == text else f"what comes back is {_quoted(back)}"
    return "\n".join(filter(None, [text_table(lines, "><"), f"{len(ids)} tokens of {size} bytes{ratio}; {exact}"]))


def _characters(tokenizer: Tokenizer, ids: list[int]) -> Iterator[list[int]]:
    """Runs of ids of which none ends within a character; there are four bytes to a character at most."""
    start = 0
    while start < len(ids):
        stops = range(start + 1, min(start + 4, len(ids)) + 1)
        stop = next((stop for stop in stops if "\ufffd" not in tokenizer.decode(ids[start:stop])), start + 1)
        yield ids[start:stop]
        start = stop


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def main() -> None:
    from absl import flags

    from pretrainax import cli

    target = flags.DEFINE_string("to", None, "train, report: the directory to write")
    sizes = flags.DEFINE_list("sizes", ["4000", "8000", "16000", "32000", "50000"], "report: values of vocab_size")
    kinds = flags.DEFINE_list("kinds", list(KINDS), "report: of tokenizers")
    directory = flags.DEFINE_string("tokenizer", None, "encode: a saved tokenizer, or a Hugging Face directory")
    text = flags.DEFINE_string("text", None, "encode: the text; from stdin where not given")

    def run(command: str) -> int:
        to = target.value and cli.folder("to", os.path.expanduser(target.value))
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
            print(encode(read_tokenizer(os.path.expanduser(directory.value)), said))
        return 0

    cli.run(run, commands=("train", "report", "encode"))


if __name__ == "__main__":
    main()
