"""Converts rows of a batch to readable views: pieces of text, each labelled with what the objective did to it."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from pretrainax.data.batch import (
    Example,
    has_pairs,
    has_prefix,
    has_word_labels,
    is_encoder_decoder,
    is_gathered,
    predicts_tokens,
)
from pretrainax.data.collate import collate
from pretrainax.data.objectives import ReplacedTokenDetection
from pretrainax.data.pipeline import Batches
from pretrainax.files.errors import counted
from pretrainax.files.json_files import JsonObject
from pretrainax.reporting.visible import visible

# Kind of a piece -> description.
KINDS = {
    "text": "unchanged text",
    "masked": "masked: the input is the mask token, the target is the word",
    "random": "random: the input is a random word, the target is the original word",
    "kept": "kept: the input is the original word, which is also the target",
    "sentinel": "sentinel: replaces a span",
    "special": "special token",
    "unknown": "unknown: not in the vocabulary",
    "padding": "padding",
}
_NAMES = tuple(KINDS)
_CODE = {name: code for code, name in enumerate(_NAMES)}


class Piece(NamedTuple):
    """The text of consecutive tokens in a row that are all marked in the same way."""

    text: str  # the text of the tokens; in a panel of inputs, the text that the model reads
    kind: str  # a key of KINDS
    tokens: int  # the number of tokens; 0 for a gap between two pieces
    target: str = ""  # the text of the target, if the view shows the target next to the input
    part: str = ""  # "A" | "B": segment of a sentence pair; "prefix": bidirectional attention; "": none of these
    new: bool = False  # True for the first piece of a document or of an example
    dim: bool = False  # True for targets without loss


class Panel(NamedTuple):
    """The inputs or the targets of a row, split into pieces."""

    name: str  # for example "encoder reads" or "predicts"
    pieces: list[Piece]


class View(NamedTuple):
    """A row of a batch for display: a title, panels of inputs and targets, and additional lines of text (notes)."""

    title: str
    panels: list[Panel]
    notes: list[str]  # for example labels

    def values(self) -> JsonObject:
        """Returns the view as values that JSON supports, with the fields of `View`, `Panel` and `Piece`."""
        panels = [{"name": p.name, "pieces": [piece._asdict() for piece in p.pieces]} for p in self.panels]
        return {"title": self.title, "notes": self.notes, "panels": panels}


class TokenTexts:
    """Decodes token ids for display. Unlike `Tokenizer.decode`, keeps the space before the first word."""

    def __init__(self, tokenizer: Any):
        self.vocabulary, self._special = tokenizer.vocabulary, tokenizer.special_pieces
        self.spellings = tokenizer.spellings()

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of consecutive token ids, making line breaks, tabs and control characters visible."""
        runs = itertools.groupby(ids.tolist(), lambda i: i in self._special or i >= len(self.spellings))
        text = "".join(
            "".join(self._special.get(i, "\ufffd") for i in run)
            if special
            else b"".join(self.spellings[i] for i in run).decode("utf-8", "replace")
            for special, run in runs
        )
        return visible(text.replace("\n", "⏎").replace("\t", "⇥"))


def row_views(batches: Batches, words: TokenTexts, count: int, step: int = 0) -> list[View]:
    """Builds views of the first `count` rows that a run reads after `step` steps."""
    views, first = [], step * batches.global_batch_size
    for number in range(first, first + count):
        objective, examples = batches.examples(number)
        lengths = batches.lengths_of(number // batches.global_batch_size)
        row = {name: array[0] for name, array in collate([examples], lengths, batches.vocabulary.pad or 0).items()}
        title = f"row {number} · {type(objective).__name__}"
        if len(examples) > 1:
            title += f" · {counted(len(examples), 'example')}"
        on_device = isinstance(objective, ReplacedTokenDetection)
        notes = ("the generator draws its replacements on the device, during training",) if on_device else ()
        views.append(view(row, words, title, notes))
    return views


def view(row: Example, words: TokenTexts, title: str = "", notes: tuple[str, ...] = ()) -> View:
    """Builds the view of a row: the inputs of the encoder and the decoder, the targets and the labels.

    Args:
      row: one padded row of a batch, i.e. one row of each array [B, ...]; it may contain several examples.
      words: decodes token ids.
      title: title of the view.
      notes: lines of text to append to the labels.
    """
    vocabulary, panels = words.vocabulary, []
    if is_encoder_decoder(row):
        tokens, segments = row["encoder_tokens"], row["encoder_segment_ids"]
        panels.append(Panel("encoder reads", _pieces(tokens, segments, _kinds(tokens, segments, vocabulary), words)))
    tokens, segments = row["tokens"], row["segment_ids"]
    kinds, parts = _kinds(tokens, segments, vocabulary), _parts(row)
    if is_gathered(row):
        panels += _masked_panels(row, kinds, parts, words)
    else:
        name = "decoder reads" if panels else "reads"
        panels.append(Panel(name, _pieces(tokens, segments, kinds, words, parts)))
    if predicts_tokens(row) and not is_gathered(row):
        targets, weights = row["targets"], row["loss_weights"]
        kinds = _kinds(targets, segments, vocabulary)
        panels.append(Panel("predicts", _pieces(targets, segments, kinds, words, dim=weights == 0)))
    labels = {"pair label": "pair_labels", "label": "labels", "label values": "label_values"}
    labels |= {"answer, first and last token": "span"}
    label_notes = [f"{label} {row[name].tolist()}" for label, name in labels.items() if name in row]
    if has_word_labels(row):
        words = row["words"][segments > 0]
        label_notes += [
            f"words {words.tolist()}",
            f"their labels {row['word_labels'][: words.max(initial=0)].tolist()}",
        ]
    return View(title, panels, [*label_notes, *notes])


def _kinds(tokens: np.ndarray, segments: np.ndarray, vocabulary: Any) -> np.ndarray:
    """Returns the code (`_CODE`) of each token's kind, [T], which depends only on the token id and on padding.

    `_masked_panels` later changes the kinds at the predicted positions.
    """
    kinds = np.where(np.isin(tokens, list(vocabulary.special_ids)), _CODE["special"], _CODE["text"])
    for name, ids in (("sentinel", vocabulary.sentinels), ("masked", vocabulary.mask), ("unknown", vocabulary.unk)):
        if ids is not None:
            kinds[np.isin(tokens, ids)] = _CODE[name]
    kinds[segments == 0] = _CODE["padding"]
    return kinds


def _parts(row: Example) -> np.ndarray:
    """Returns the `Piece.part` of each token, [T]: "A", "B", "prefix" or ""."""
    if has_pairs(row):
        return np.where(row["token_types"] == 0, "A", "B")
    if has_prefix(row):
        return np.where(row["prefix_mask"] > 0, "prefix", "")
    return np.full(len(row["tokens"]), "")


def _masked_panels(row: Example, kinds: np.ndarray, parts: np.ndarray, words: TokenTexts) -> list[Panel]:
    """Builds both panels of a masked row: the inputs, with each target shown at its position, and the targets alone.

    Updates `kinds` [T] in place: marks each predicted position as masked, random or kept.
    """
    tokens, segments = row["tokens"], row["segment_ids"]
    is_loss = row["loss_weights"] > 0
    positions, targets = row["masked_positions"][is_loss], row["targets"][is_loss]
    kinds[positions] = np.where(
        tokens[positions] == words.vocabulary.mask,
        _CODE["masked"],
        np.where(tokens[positions] == targets, _CODE["kept"], _CODE["random"]),
    )
    originals = np.full(len(tokens), -1)
    originals[positions] = targets
    order = np.argsort(positions, kind="stable")
    runs = np.split(targets[order], np.flatnonzero(np.diff(positions[order]) > 1) + 1)
    predicted = [Piece(words.decode(run).strip(" "), "text", len(run), new=False) for run in runs if len(run)]
    is_pair = has_pairs(row)
    inputs = _pieces(tokens, segments, kinds, words, parts, originals=originals, separates=not is_pair)
    gap = Piece(" … ", "padding", 0)
    targets_and_gaps = [piece for target in predicted for piece in (gap, target)][1:]
    return [Panel("reads", inputs), Panel("predicts", targets_and_gaps)]


def _pieces(tokens, segments, kinds, words, parts=None, *, originals=None, dim=None, separates=True) -> list[Piece]:
    """Groups consecutive tokens into pieces that share the same document, kind, part and dimming.

    Each position with a target in `originals` becomes a separate piece.

    Args:
      tokens, segments: [T] token ids, and [T] example numbers from 1 (0: padding).
      kinds: [T] codes of `_CODE`.
      words: decodes token ids.
      parts: [T] values of `Piece.part`. If None, "" for all tokens.
      originals: [T] target ids at the predicted positions, -1 elsewhere. If None, no position is predicted.
      dim: [T] True for targets without loss. If None, False for all tokens.
      separates: whether the vocabulary's separator token ends a document.
    """
    n = len(tokens)
    parts = np.full(n, "") if parts is None else parts
    dim = np.zeros(n, bool) if dim is None else dim
    new = np.zeros(n, bool)
    new[1:] = segments[1:] != segments[:-1]
    if separates and words.vocabulary.separator is not None:
        ends = tokens[:-1] == words.vocabulary.separator
        ends &= np.append(False, segments[1:-1] == segments[:-2]) if n > 1 else False  # not the start of a decoder
        new[1:] |= ends
    new &= segments > 0
    is_predicted = np.zeros(n, bool) if originals is None else originals >= 0
    starts = np.ones(n, bool)
    starts[1:] = new[1:] | is_predicted[1:] | is_predicted[:-1] | (dim[1:] != dim[:-1])
    starts[1:] |= (kinds[1:] != kinds[:-1]) | (parts[1:] != parts[:-1])
    bounds = [*np.flatnonzero(starts).tolist(), n]
    pieces = []
    for start, end in itertools.pairwise(bounds):
        kind = _NAMES[kinds[start]]
        text = "" if kind == "padding" else words.decode(tokens[start:end])
        target = words.decode(originals[start:end]) if is_predicted[start] else ""
        if is_predicted[start]:  # the space before the word follows the original text, not the input
            text = " " * target.startswith(" ") + text.strip(" ")
        pieces.append(
            Piece(
                text,
                kind,
                end - start,
                target.strip(" ") or ("␣" if target else ""),
                "" if kind == "padding" else str(parts[start]),
                bool(new[start]),
                bool(dim[start]) and kind != "padding",
            )
        )
    return pieces
