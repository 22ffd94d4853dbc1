"""Compares tokenizers of several kinds and sizes, trained on the same text and measured on the same held-out text."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pretrainax.config import UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.streams import print_progress
from pretrainax.reporting.tables import markdown
from pretrainax.reporting.units import percent
from pretrainax.tokenization.base import Tokenizer, unknown_share
from pretrainax.tokenization.choices import TokenizerConfig
from pretrainax.tokenization.sentencepiece import BPE, Unigram
from pretrainax.tokenization.subwords import ByteBPE, WordPiece

KINDS = {"unigram": Unigram, "bpe": BPE, "byte_bpe": ByteBPE, "wordpiece": WordPiece}
# (tokenizer, bytes per token) -> {"embedding_parameters": …, "flops_per_byte": …} of a model that uses the tokenizer.
Costs = Callable[[Tokenizer, float], dict[str, float]]


def compare(
    given: TokenizerConfig,
    training: Sequence[str],
    held_out: Sequence[str],
    kinds: Sequence[str],
    sizes: Sequence[int],
    costs: Costs,
    say: Callable[[str], None] = print_progress,
) -> JsonObject:
    """Trains a tokenizer of each kind and vocab_size, and measures it on held-out documents.

    Args:
      given: the value of config.tokenizer, whose fields (except vocab_size and path) apply to tokenizers of its kind.
      training: documents to train on.
      held_out: documents to measure on.
      kinds: keys of KINDS.
      sizes: values of config.tokenizer.vocab_size.
      costs: returns the costs of a model that uses a given tokenizer.
      say: prints a line of progress.

    Returns:
      A JSON object. "rows" has each tokenizer's metrics. "skipped" lists the kinds and sizes for which the training
      text is too short, with the reason. "training_bytes", "held_out_bytes" and "held_out_documents" are the sizes of
      the two sets of documents.
    """
    rows, skipped = [], []
    for kind in kinds:
        for size in sizes:
            start_time = time.perf_counter()
            try:
                tokenizer = _config(given, KINDS[kind], size).build(iter(training))
            except UserError as e:
                skipped.append({"kind": kind, "size": size, "reason": str(e)})
                say(f"{kind} {size:,}: skipped, {e}")
                continue
            seconds = time.perf_counter() - start_time
            metrics = measure(tokenizer, held_out)
            metrics |= costs(tokenizer, metrics["bytes_per_token"])
            rows.append({"kind": kind, "size": size, **metrics, "training_seconds": seconds})
            say(f"{kind} {size:,}: {metrics['bytes_per_token']:.3f} bytes per token, trained in {seconds:.1f} s")
    return {
        "training_bytes": _count_bytes(training),
        "held_out_bytes": _count_bytes(held_out),
        "held_out_documents": len(held_out),
        "rows": rows,
        "skipped": skipped,
    }


def _config(given: Any, kind: type[TokenizerConfig], size: int) -> TokenizerConfig:
    return dataclasses.replace(given if type(given) is kind else kind(), vocab_size=size, path=None)


def measure(tokenizer: Tokenizer, texts: Sequence[str]) -> JsonObject:
    """Measures a tokenizer on documents: compression, vocabulary use, and encoding speed on one core.

    Args:
      texts: the documents.
    """
    with _one_thread():
        start_time = time.process_time()  # CPU time, independent of other load on the machine
        encoded = tokenizer.encode_batch(list(texts))
        seconds = time.process_time() - start_time
    vocabulary, size = tokenizer.vocabulary, _count_bytes(texts)
    counts = np.bincount(np.concatenate(encoded), minlength=vocabulary.size)
    tokens, piece_counts = int(counts.sum()), np.delete(counts, sorted(vocabulary.special_ids))
    restored_texts = [text for text, ids in zip(texts, encoded, strict=True) if tokenizer.decode(ids) == text]
    return {
        "vocabulary": vocabulary.size,
        "tokens": tokens,
        "bytes_per_token": size / tokens,
        "tokens_per_word": tokens / max(sum(len(text.split()) for text in texts), 1),
        "unknown_share": unknown_share(counts, tokenizer),
        "restored_share": _count_bytes(restored_texts)
        / size,  # fraction of the bytes that are in documents whose ids decode to the same text
        "pieces": len(piece_counts),  # number of ids that are not special
        "pieces_used": int((piece_counts > 0).sum()),
        "pieces_below_10": int(
            (piece_counts < 10).sum()
        ),  # pieces that occur fewer than 10 times, unused pieces included
        "encoded_mb_per_second": size / 1e6 / max(seconds, 1e-9),
    }


def table(results: JsonObject) -> str:
    """Formats the results of `compare` as a Markdown table, with a description of the data and the columns."""
    header = [
        *("tokenizer", "vocab_size", "bytes per token", "tokens per word", "unknown", "restored", "used", "under 10 ×"),
        *("embedding, M", "MFLOP per byte", "MB/s", "trained in, s"),
    ]
    rows = [
        [
            row["kind"],
            f"{row['size']:,}",
            f"{row['bytes_per_token']:.3f}",
            f"{row['tokens_per_word']:.3f}",
            f"{row['unknown_share']:.3%}",
            percent(row["restored_share"]),
            percent(row["pieces_used"] / row["pieces"], 1),
            f"{row['pieces_below_10']:,}",
            f"{row['embedding_parameters'] / 1e6:.2f}",
            f"{row['flops_per_byte'] / 1e6:.3g}",
            f"{row['encoded_mb_per_second']:.1f}",
            f"{row['training_seconds']:.1f}",
        ]
        for row in results["rows"]
    ]
    lines = [
        f"Trained on {results['training_bytes'] / 1e6:.2f} MB, measured on {results['held_out_bytes'] / 1e6:.2f} MB "
        f"of validation text in {results['held_out_documents']:,} documents.",
        "",
        markdown(header, rows),
        "unknown: share of tokens that are unk or bytes of characters without a piece; restored: share of text in "
        "documents that decode exactly; used: share of pieces in the validation text; under 10 ×: pieces with fewer "
        "than 10 uses in it; embedding: embedding parameters of config.model with this vocabulary; MFLOP per byte: its "
        "training FLOPs per byte of text; MB/s: encoding speed on one core.",
        "",
        f"Fewest FLOPs per byte: {', '.join(_format_cheapest(results['rows'])) or 'no tokenizer was trained'}.",
    ]
    if results["skipped"]:
        lines += ["", f"Skipped {len(results['skipped'])}:", ""]
        lines += [f"- {skipped['kind']} {skipped['size']:,}: {skipped['reason']}" for skipped in results["skipped"]]
    return "\n".join(lines) + "\n"


def write_report(results: JsonObject, directory: str) -> None:
    """Writes the results of `compare` to report.md, report.json and, if a tokenizer was trained, report.png."""
    from pretrainax.reporting.text_plots import draw_tokenizers  # a local import, because matplotlib is slow to import

    os.makedirs(directory, exist_ok=True)
    for name, content in (("report.md", table(results)), ("report.json", json.dumps(results, indent=1) + "\n")):
        write_atomically(os.path.join(directory, name), content)
    if results["rows"]:
        draw_tokenizers(os.path.join(directory, "report.png"), results)


def _format_cheapest(rows: Sequence[JsonObject]) -> Iterator[str]:
    for kind in dict.fromkeys(row["kind"] for row in rows):
        cheapest = min((row for row in rows if row["kind"] == kind), key=lambda row: row["flops_per_byte"])
        yield f"{kind} {cheapest['size']:,}"


def _count_bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limits the `tokenizers` library to one thread inside the context, with an environment variable."""
    previous_value = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if previous_value is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = previous_value
