"""Defines the batch contract: the arrays that each model family reads, with their shapes and meanings.

`FIELDS` is the contract as a table, and `check_batch` checks a batch against it. The data pipeline writes batches;
models and losses read them. Both use the predicates below to find out what kind of batch they have. The module imports
no JAX, because loader workers create batches too.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

import numpy as np

from pretrainax.config import ModelConfig, UserError

if TYPE_CHECKING:
    import jax

# Each maps names of FIELDS to arrays [B, …].
HostBatch = Mapping[str, np.ndarray]  # from the data pipeline: the rows of this process
Batch = Mapping[str, "jax.Array"]  # for models and losses: the global batch on the mesh, or some of its rows
Example = dict[str, np.ndarray]  # one example: the same names, without padding and without the axis B


class Lengths(NamedTuple):
    """The token counts of one example or one row."""

    raw: int  # corpus tokens from which the example or row is built
    inputs: int  # input tokens of the encoder; in decoder-only models, of the decoder
    targets: int  # predicted tokens


class Field(NamedTuple):
    """Describes one array of a batch.

    shape: the axes, one letter each. B is the number of rows in the batch and T the number of tokens per row (in an
    encoder-decoder, of decoder tokens). S is the number of encoder tokens per row in an encoder-decoder. N is the
    number of predictions per row, which equals T unless the batch is gathered (`is_gathered`). L is the number of
    labels per row, and C is `width`.

    below: the exclusive upper bound of the values. It is a number, the name of a field of config.model, "T" (the row
    length), "labels" (2), "classes" (config.model.head.num_labels), or "" (no bound).
    """

    name: str
    shape: str
    families: tuple[str, ...]  # values of config.model.family; (): all
    meaning: str
    dtype: type = np.int32
    optional: bool = False
    below: Union[str, int] = ""
    width: int = 0  # size of the axis C

    def belongs_to(self, family: str) -> bool:
        """Returns True if batches for models of this family have this array."""
        return not self.families or family in self.families


_ENCODER, _DECODER, _BOTH, _ALL = ("encoder",), ("decoder",), ("encoder_decoder",), ()
FIELDS: list[Field] = []
SHAPES: dict[str, str] = {}  # name of a field -> its shape


def register_fields(*fields: Field) -> None:
    """Adds fields to the batch contract."""
    FIELDS.extend(fields)
    SHAPES.update({field.name: field.shape for field in fields})


register_fields(
    Field("tokens", "BT", _ALL, "input tokens of the model; of the decoder in an encoder-decoder", below="vocab_size"),
    Field("targets", "BN", _ALL, "token to predict; absent in tasks with labels", below="vocab_size"),
    Field("segment_ids", "BT", _ALL, "segment (document) of a token, from 1; 0: padding, which no token attends to"),
    Field(
        "text_lengths",
        "B",
        _ALL,
        "tokens of the only segment of a row, from the row's start; absent: rows may have several segments",
        optional=True,
    ),
    Field("positions", "BT", _ALL, "position of a token in its segment, from 0", below="position.max_length"),
    Field("loss_weights", "BN", _ALL, "weight of a prediction in the loss; 0: no prediction", np.float32),
    Field("text_weights", "BN", _ALL, "loss_weights, set to 0 if the target is not text", np.float32, optional=True),
    Field(
        "denominator",
        "B",
        _ALL,
        "denominator of the token loss, summed over the batch; absent: the sum of loss_weights",
        np.float32,
        optional=True,
    ),
    Field("text_tokens", "B", _ALL, "number of text tokens that the row was made from", optional=True),
    Field("text_bytes", "B", _ALL, "UTF-8 bytes of these tokens", optional=True),
    Field("target_bytes", "B", _ALL, "UTF-8 bytes of the targets, by their loss_weights", np.float32, optional=True),
    Field("token_types", "BT", _ENCODER, "segment of a pair that a token belongs to, 0 or 1", below="num_token_types"),
    Field("masked_positions", "BN", _ENCODER, "positions of the predictions in the row", optional=True, below="T"),
    Field(
        "replacements",
        "BN",
        _ENCODER,
        "input at a masked position: 1 [MASK], 2 another token, 3 the target; only in validation",
        optional=True,
    ),
    Field("pair_labels", "B", _ENCODER, "label of the pair of segments", optional=True, below="labels"),
    Field("replaced", "BT", _ENCODER, "1 if a token was replaced; absent: a generator replaces tokens", optional=True),
    Field("prefix_mask", "BT", _DECODER, "1 if earlier tokens attend to this token too", optional=True),
    Field("labels", "B", _ALL, "class of a row, from 0", optional=True, below="classes"),
    Field("label_values", "BL", _ALL, "0 or 1 for each label, or the regression targets", np.float32, optional=True),
    Field("words", "BT", _ALL, "index in the row of the word that a token represents, from 1; 0: none", optional=True),
    Field(
        "word_labels",
        "BT",
        _ALL,
        "class of each of these words, in their order",
        optional=True,
        below="classes",
    ),
    Field("span", "BL", _ALL, "first and last token of the answer to a question", optional=True, below="T"),
    Field("question", "BT", _ENCODER, "1 from the start of the row to the end of the question", optional=True),
    Field("texts", "B", _ALL, "sequences in a retriever's row: query, passage, hard negatives", optional=True),
    Field("encoder_tokens", "BS", _BOTH, "input tokens of the encoder", below="vocab_size"),
    Field("encoder_segment_ids", "BS", _BOTH, "as segment_ids; decoder segment i attends to encoder segment i"),
    Field("encoder_text_lengths", "B", _BOTH, "as text_lengths", optional=True),
    Field("encoder_positions", "BS", _BOTH, "as positions", below="position.max_length"),
)
TOKEN_FIELDS = ("tokens", "encoder_tokens")  # inputs of the model
SEGMENT_FIELDS = ("segment_ids", "encoder_segment_ids")  # with 0 for padding
REPLACEMENTS = ("masked", "random", "unchanged")  # names of the values 1, 2 and 3 of "replacements"
LENGTH_FIELDS = {"text_lengths": "segment_ids", "encoder_text_lengths": "encoder_segment_ids"}  # lengths -> segment ids


# --- kinds of batches -----------------------------------------------------------------------------------------------
# These predicates test only which names are present: `batch` may be a batch, a row, an example, or a batch's shapes.


def is_encoder_decoder(batch: Collection[str]) -> bool:
    """Returns True if the batch is for an encoder-decoder, whose encoder reads `encoder_tokens`."""
    return "encoder_tokens" in batch


def is_gathered(batch: Collection[str]) -> bool:
    """Returns True if the model predicts only at `masked_positions`.

    At BERT's mask rate, the head then computes logits for only 15 % of the positions.
    """
    return "masked_positions" in batch


def has_pairs(batch: Collection[str]) -> bool:
    """Returns True if each row is a pair of segments with a label (`pair_labels`)."""
    return "pair_labels" in batch


def has_previous(batch: Collection[str]) -> bool:
    """Returns True if the batch has targets for a right-to-left model, which predicts the previous token."""
    return "previous" in batch


def has_replaced(batch: Collection[str]) -> bool:
    """Returns True if the batch already has replaced tokens, or False if the model's generator must replace tokens."""
    return "replaced" in batch


def has_prefix(batch: Collection[str]) -> bool:
    """Returns True if the decoder attends to a prefix of each row in both directions."""
    return "prefix_mask" in batch


def has_loss(batch: Collection[str]) -> bool:
    """Returns True if the batch has loss weights; without them, a model only computes its outputs."""
    return "loss_weights" in batch


def predicts_tokens(batch: Collection[str]) -> bool:
    """Returns True if the batch has target tokens, or False if the model predicts task labels instead."""
    return "targets" in batch


def has_labels(batch: Collection[str]) -> bool:
    """Returns True if each row has a task label: a class, or a vector of values."""
    return "labels" in batch or "label_values" in batch


def has_span(batch: Collection[str]) -> bool:
    """Returns True if each row has the first and last position of an answer span for the model to extract."""
    return "span" in batch


def has_word_labels(batch: Collection[str]) -> bool:
    """Returns True if the words of each row have task labels."""
    return "word_labels" in batch


def has_retrieval_rows(batch: Collection[str]) -> bool:
    """Returns True if each row has a query and its passages, each of which the model encodes as one vector."""
    return "texts" in batch


def segments_of(batch: Batch, side: Literal["", "encoder_"] = "") -> "jax.Array":
    """Returns the attention segments: the row lengths [B], if present, or else the segment ids [B, T] or [B, S].

    A batch has row lengths only if every row is a single segment.

    side: "" for the segments of `tokens`; "encoder_" for the segments of `encoder_tokens`.
    """
    return batch.get(f"{side}text_lengths", batch[f"{side}segment_ids"])


def tokens_read(batch: Mapping[str, Any]) -> int:
    """Returns the number of tokens that the model reads, in the encoder and the decoder together, including padding."""
    return sum(batch[name].size for name in TOKEN_FIELDS if name in batch)


def padding(batch: HostBatch | Batch) -> tuple[object, int]:
    """Returns the number of padding tokens in the model's inputs, and the total number of input tokens."""
    segments = [batch[name] for name in SEGMENT_FIELDS if name in batch]
    return sum((s == 0).sum() for s in segments), sum(s.size for s in segments)


def highest_id(batch: HostBatch) -> int:
    """Returns the highest token id in the inputs and targets, reading a negative id as a large unsigned number."""
    ids = (field.name for field in FIELDS if field.below == "vocab_size" and field.name in batch)
    return max(int(batch[name].view(np.uint32).max()) for name in ids)


def lengths_of(batch: Mapping[str, Any]) -> Lengths:
    """Returns the row lengths of a batch, computed from its shapes.

    The number of corpus tokens, `raw`, cannot be computed from the shapes, so it is set to the value of `inputs`.
    """
    inputs = batch["encoder_tokens" if is_encoder_decoder(batch) else "tokens"].shape[1]
    return Lengths(inputs, inputs, batch["targets" if predicts_tokens(batch) else "tokens"].shape[1])


def row_length(name: str, batch: Mapping[str, Any], lengths: Lengths) -> int:
    """Returns the size of the second axis of the array `name` in a padded batch.

    An array that is not in FIELDS has the shape [B, T].

    lengths: the lengths to which the rows are padded.
    """
    letter = SHAPES.get(name, "BT")[1]
    if letter == "L":  # equal in all rows
        return batch[name].shape[-1]
    return _sizes(lengths, is_encoder_decoder(batch), is_gathered(batch))[letter]


def _sizes(lengths: Lengths, has_encoder: bool, are_gathered: bool) -> dict[str, int]:
    """Returns the sizes of the axes T, S and N in the shapes of FIELDS, keyed by letter."""
    num_tokens = lengths.targets if has_encoder else lengths.inputs
    return {"T": num_tokens, "S": lengths.inputs, "N": lengths.targets if are_gathered else num_tokens}


# --- validation -----------------------------------------------------------------------------------------------------


def check_batch(batch: HostBatch, model: ModelConfig, lengths: Lengths, batch_size: int) -> None:
    """Checks that the arrays of `batch` match FIELDS for `model`.

    Args:
      batch: arrays [B, ...]; arrays that FIELDS does not list for this model family are ignored.
      lengths: row lengths of the objective, at the sequence length of the run.
      batch_size: the number of rows, B.

    Raises:
      UserError: an array is missing, or its dtype, shape or values are wrong. The message names the array and says what
        was expected and what was found.
    """
    family = model.family
    sizes = {"B": batch_size, **_sizes(lengths, family == "encoder_decoder", is_gathered(batch))}
    sizes["L"] = getattr(model.head, "num_labels", 0)
    has_task_targets = has_labels(batch) or has_word_labels(batch) or has_span(batch) or has_retrieval_rows(batch)
    absent = ("targets", "loss_weights") if has_task_targets else ()
    required = ("question",) if model.reads_question else ()
    fields = [
        f
        for f in FIELDS
        if f.belongs_to(family) and (f.name in (*batch, *required) or not (f.optional or f.name in absent))
    ]
    for field in fields:
        expected = (
            f"{np.dtype(field.dtype)} {[field.width if letter == 'C' else sizes[letter] for letter in field.shape]}"
        )
        if field.name not in batch:
            raise UserError(f"batch has no {field.name!r}, the {family} expects {expected}")
        actual = batch[field.name]
        if expected != f"{actual.dtype} {list(actual.shape)}":
            raise UserError(f"batch[{field.name!r}] is {actual.dtype} {list(actual.shape)}, not {expected}")
    for field in fields:
        if field.dtype is np.int32:
            _check_values(field, batch[field.name], model, sizes)
    weights = batch.get("loss_weights", np.ones(1))
    if not (np.isfinite(weights).all() and weights.min() >= 0 and weights.max() > 0):
        raise UserError("batch['loss_weights'] must be finite, not negative, and not all 0")


def _check_values(field: Field, values: np.ndarray, model: ModelConfig, sizes: Mapping[str, int]) -> None:
    """Raises UserError if an integer array has a value that is negative or not below its field's bound."""
    name, low, high = f"batch[{field.name!r}]", values.min(), values.max()
    if field.below == "vocab_size":
        if low < 0 or high >= model.vocab_size:
            raise UserError(
                f"{name} has ids from {low} to {high}; config.model.vocab_size {model.vocab_size} allows 0 to "
                f"{model.vocab_size - 1}"
            )
        return
    if low < 0:
        raise UserError(f"{name} has {low}; it must not be negative")
    if isinstance(field.below, int) and high >= field.below:
        raise UserError(f"{name} has {high}; it must be below {field.below}")
    if field.below == "T" and high >= sizes["T"]:
        raise UserError(f"{name} has {high}; rows have {sizes['T']} tokens")
    if field.below == "labels" and high >= 2:
        raise UserError(f"{name} has {high}; labels must be 0 or 1")
    if field.below == "classes" and high >= sizes["L"]:
        raise UserError(f"{name} has {high}; config.model.head.num_labels {sizes['L']} allows 0 to {sizes['L'] - 1}")
    # There is no bound if positions have no maximum length, or if the model has no token types.
    limits = {"position.max_length": model.position.max_length, "num_token_types": model.num_token_types or None}
    limit = limits.get(str(field.below))
    if limit is not None and high >= limit:
        raise UserError(f"{name} has {high}; config.model.{field.below} {limit} allows 0 to {limit - 1}")
