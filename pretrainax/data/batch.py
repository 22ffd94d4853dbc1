"""The contract of a batch: which names the models of a family are given, and what the array of each name holds.

`FIELDS` is that contract as a table; `check_batch` holds a batch against it. Data writes batches, models and losses
read them; both ask here what kind a batch is. Imports no JAX: loader workers make batches too.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

import numpy as np

from pretrainax.config import ModelConfig, UserError

if TYPE_CHECKING:
    import jax

# [B, …] each, under the names of FIELDS
HostBatch = Mapping[str, np.ndarray]  # as data makes it: this process's rows
Batch = Mapping[str, "jax.Array"]  # as models and losses read it: the global batch on the mesh, or a part of it
Example = dict[str, np.ndarray]  # one example under the same names, not padded, without the axis B


class Lengths(NamedTuple):
    """Tokens of one example, or of one row."""

    raw: int  # taken from the corpus
    inputs: int  # read by the encoder, or by the decoder where there is no encoder
    targets: int  # predicted


class Field(NamedTuple):
    """An array of a batch.

    shape: B rows, of T tokens each; of S tokens that an encoder reads for a decoder; of N predictions: T, or fewer
      where they are gathered; L labels of a row; C is `width`.
    below: the bound of its values: a number, a field of config.model, the length T of a row, or the number of "labels"
      or of "classes".
    """

    name: str
    shape: str
    families: tuple[str, ...]  # values of config.model.family; (): all of them
    meaning: str
    dtype: type = np.int32
    optional: bool = False
    below: Union[str, int] = ""
    width: int = 0  # of an axis C

    def is_of(self, family: str) -> bool:
        """Returns True if models of a family have this array."""
        return not self.families or family in self.families


_ENCODER, _DECODER, _BOTH, _ALL = ("encoder",), ("decoder",), ("encoder_decoder",), ()
FIELDS: list[Field] = []
SHAPES: dict[str, str] = {}  # name of a field -> its shape


def register_fields(*fields: Field) -> None:
    """Adds arrays to the batches of a family."""
    FIELDS.extend(fields)
    SHAPES.update({field.name: field.shape for field in fields})


register_fields(
    Field("tokens", "BT", _ALL, "what the model reads; the decoder, where there are two", below="vocab_size"),
    Field("targets", "BN", _ALL, "the token to predict; of no task with labels", below="vocab_size"),
    Field("segment_ids", "BT", _ALL, "which text of the row a token is of, from 1; 0 is padding, which nobody sees"),
    Field(
        "text_lengths",
        "B",
        _ALL,
        "tokens of the one text of a row, from its start; absent: rows may have several",
        optional=True,
    ),
    Field("positions", "BT", _ALL, "place of a token in its text, from 0", below="position.max_length"),
    Field("loss_weights", "BN", _ALL, "how much a prediction counts; 0: it is not asked for", np.float32),
    Field("text_weights", "BN", _ALL, "the same, and 0 where the target is no text", np.float32, optional=True),
    Field(
        "denominator",
        "B",
        _ALL,
        "what the loss of tokens is divided by, summed over the batch; absent: the sum of loss_weights",
        np.float32,
        optional=True,
    ),
    Field("text_tokens", "B", _ALL, "tokens of text that a row is made of", optional=True),
    Field("text_bytes", "B", _ALL, "bytes of UTF-8 that these have", optional=True),
    Field("target_bytes", "B", _ALL, "bytes that the targets have, by their weights", np.float32, optional=True),
    Field("token_types", "BT", _ENCODER, "which segment of a pair a token is of, 0 or 1", below="num_token_types"),
    Field("masked_positions", "BN", _ENCODER, "where in the row a prediction is made", optional=True, below="T"),
    Field("pair_labels", "B", _ENCODER, "what is to be said of the pair of segments", optional=True, below="labels"),
    Field("replaced", "BT", _ENCODER, "1 where a token is not the text's, if no generator tells", optional=True),
    Field("prefix_mask", "BT", _DECODER, "1 where a token is seen by those before it too", optional=True),
    Field("labels", "B", _ALL, "the class of a row, from 0", optional=True, below="classes"),
    Field("label_values", "BL", _ALL, "of each label 1 or 0, or the numbers to tell", np.float32, optional=True),
    Field("words", "BT", _ALL, "which word of the row a token tells of, from 1; 0: of none", optional=True),
    Field(
        "word_labels",
        "BT",
        _ALL,
        "the class of each of these words, in their order",
        optional=True,
        below="classes",
    ),
    Field("span", "BL", _ALL, "where the answer to a question begins and ends in a row", optional=True, below="T"),
    Field("question", "BT", _ENCODER, "1 where a token is of the question, from the row's start", optional=True),
    Field("texts", "B", _ALL, "texts of the row, of a retriever: a query, its passage, hard negatives", optional=True),
    Field("encoder_tokens", "BS", _BOTH, "what the encoder reads", below="vocab_size"),
    Field("encoder_segment_ids", "BS", _BOTH, "as segment_ids; the decoder's segment i reads this segment i"),
    Field("encoder_text_lengths", "B", _BOTH, "as text_lengths", optional=True),
    Field("encoder_positions", "BS", _BOTH, "as positions", below="position.max_length"),
)
TOKEN_FIELDS = ("tokens", "encoder_tokens")  # what enters the model
SEGMENT_FIELDS = ("segment_ids", "encoder_segment_ids")  # and which of it is padding
LENGTH_FIELDS = {"text_lengths": "segment_ids", "encoder_text_lengths": "encoder_segment_ids"}  # of which segments


# --- which kind a batch is ------------------------------------------------------------------------------------------
# Each asks the names alone: `batch` may be a batch, one row of it, an example, or the shapes of a batch.


def is_encoder_decoder(batch: Collection[str]) -> bool:
    """Returns True if an encoder reads `encoder_tokens` for the decoder."""
    return "encoder_tokens" in batch


def is_gathered(batch: Collection[str]) -> bool:
    """Returns True if predictions are asked for at `masked_positions` alone (15 % of the head's work)."""
    return "masked_positions" in batch


def has_pairs(batch: Collection[str]) -> bool:
    """Returns True if rows are pairs of segments with a label."""
    return "pair_labels" in batch


def has_previous(batch: Collection[str]) -> bool:
    """Returns True if the token before each is to be predicted too, by what reads from right to left."""
    return "previous" in batch


def has_replaced(batch: Collection[str]) -> bool:
    """Returns True if the batch tells itself which tokens were replaced; else the generator of the model does."""
    return "replaced" in batch


def has_prefix(batch: Collection[str]) -> bool:
    """Returns True if a decoder sees the prefix of its text from both sides."""
    return "prefix_mask" in batch


def has_loss(batch: Collection[str]) -> bool:
    """Returns True if the batch says which predictions count; without, a model is only asked what it says."""
    return "loss_weights" in batch


def predicts_tokens(batch: Collection[str]) -> bool:
    """Returns True if tokens are to be predicted; a task with labels predicts those."""
    return "targets" in batch


def has_labels(batch: Collection[str]) -> bool:
    """Returns True if rows have labels of a task."""
    return "labels" in batch or "label_values" in batch


def has_span(batch: Collection[str]) -> bool:
    """Returns True if rows have an answer to find."""
    return "span" in batch


def has_word_labels(batch: Collection[str]) -> bool:
    """Returns True if the words of rows have labels of a task."""
    return "word_labels" in batch


def has_texts(batch: Collection[str]) -> bool:
    """Returns True if a row is a query and its passages, each of which becomes a vector."""
    return "texts" in batch


def segments_of(batch: Batch, side: Literal["", "encoder_"] = "") -> "jax.Array":
    """Returns what says which tokens of a row may see each other: the length of its one text, [B], or segment ids."""
    return batch.get(f"{side}text_lengths", batch[f"{side}segment_ids"])


def tokens_read(batch: Mapping[str, Any]) -> int:
    """Counts the tokens that enter the model, padding included; the encoder's and the decoder's."""
    return sum(batch[name].size for name in TOKEN_FIELDS if name in batch)


def padding(batch: HostBatch | Batch) -> tuple[object, int]:
    """Counts which of the tokens that enter the model are padding, and all of them."""
    segments = [batch[name] for name in SEGMENT_FIELDS if name in batch]
    return sum((s == 0).sum() for s in segments), sum(s.size for s in segments)


def highest_id(batch: HostBatch) -> int:
    """Returns the highest id of a token that is read or predicted; a negative one counts as very high."""
    ids = (field.name for field in FIELDS if field.below == "vocab_size" and field.name in batch)
    return max(int(batch[name].view(np.uint32).max()) for name in ids)


def lengths_of(batch: Mapping[str, Any]) -> Lengths:
    """Reads the lengths of the rows off their shapes; `raw`, which these do not tell, is that of the inputs."""
    inputs = batch["encoder_tokens" if is_encoder_decoder(batch) else "tokens"].shape[1]
    return Lengths(inputs, inputs, batch["targets" if predicts_tokens(batch) else "tokens"].shape[1])


def row_length(name: str, batch: Mapping[str, Any], lengths: Lengths) -> int:
    """Returns how long the array of a name is in each row of such a batch. A name of its own is as long as the text."""
    letter = SHAPES.get(name, "BT")[1]
    if letter == "L":  # the same in each row
        return batch[name].shape[-1]
    return _sizes(lengths, is_encoder_decoder(batch), is_gathered(batch))[letter]


def _sizes(lengths: Lengths, two_sides: bool, gathered: bool) -> dict[str, int]:
    """Returns what the letters of a shape stand for."""
    text = lengths.targets if two_sides else lengths.inputs
    return {"T": text, "S": lengths.inputs, "N": lengths.targets if gathered else text}


# --- the check ------------------------------------------------------------------------------------------------------


def check_batch(batch: HostBatch, model: ModelConfig, lengths: Lengths, batch_size: int) -> None:
    """Raises UserError, naming key, expected and got, unless `batch` is what `model` takes, as FIELDS say.

    Args:
      batch: arrays [B, ...]; names that its family does not know are not looked at.
      lengths: of the objective, for the run's sequence length.
      batch_size: B.
    """
    family = model.family
    sizes = {"B": batch_size, **_sizes(lengths, family == "encoder_decoder", is_gathered(batch))}
    sizes["L"] = getattr(model.head, "num_labels", 0)
    has_answers = has_labels(batch) or has_word_labels(batch) or has_span(batch) or has_texts(batch)
    absent = ("targets", "loss_weights") if has_answers else ()
    needed = ("question",) if model.reads_question else ()
    fields = [
        f for f in FIELDS if f.is_of(family) and (f.name in (*batch, *needed) or not (f.optional or f.name in absent))
    ]
    for field in fields:
        wanted = (
            f"{np.dtype(field.dtype)} {[field.width if letter == 'C' else sizes[letter] for letter in field.shape]}"
        )
        if field.name not in batch:
            raise UserError(f"batch has no {field.name!r}, the {family} needs {wanted}")
        got = batch[field.name]
        if wanted != f"{got.dtype} {list(got.shape)}":
            raise UserError(f"batch[{field.name!r}] is {got.dtype} {list(got.shape)}, not {wanted}")
    for field in fields:
        if field.dtype is np.int32:
            _check_values(field, batch[field.name], model, sizes)
    weights = batch.get("loss_weights", np.ones(1))
    if not (np.isfinite(weights).all() and weights.min() >= 0 and weights.max() > 0):
        raise UserError("batch['loss_weights'] must be finite and not negative, and not all 0")


def _check_values(field: Field, values: np.ndarray, model: ModelConfig, sizes: Mapping[str, int]) -> None:
    """Raises UserError where an integer is negative, or not below what bounds it."""
    name, low, high = f"batch[{field.name!r}]", values.min(), values.max()
    if field.below == "vocab_size":
        if low < 0 or high >= model.vocab_size:
            raise UserError(
                f"{name} has ids from {low} to {high}, config.model.vocab_size {model.vocab_size} takes 0 to "
                f"{model.vocab_size - 1}"
            )
        return
    if low < 0:
        raise UserError(f"{name} has {low}, it must not be negative")
    if isinstance(field.below, int) and high >= field.below:
        raise UserError(f"{name} has {high}, it must be below {field.below}")
    if field.below == "T" and high >= sizes["T"]:
        raise UserError(f"{name} has {high}, rows have {sizes['T']} tokens")
    if field.below == "labels" and high >= 2:
        raise UserError(f"{name} has {high}, the labels are 0 and 1")
    if field.below == "classes" and high >= sizes["L"]:
        raise UserError(f"{name} has {high}, config.model.head.num_labels {sizes['L']} takes 0 to {sizes['L'] - 1}")
    # Without a length positions are not bounded, and without types of tokens they are not looked up.
    rows = {"position.max_length": model.position.max_length, "num_token_types": model.num_token_types or None}
    limit = rows.get(str(field.below))
    if limit is not None and high >= limit:
        raise UserError(f"{name} has {high}, config.model.{field.below} {limit} takes 0 to {limit - 1}")
