"""Adds the special tokens of training around a text, so that inputs at inference have the training format."""

from collections.abc import Sequence
from typing import NamedTuple, Optional, TypeVar

import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.batch import Example, is_encoder_decoder
from pretrainax.data.framing import special_token_frame as frame_of_texts
from pretrainax.data.objectives import CausalLM, Objective
from pretrainax.data.row_stream import default_packing
from pretrainax.data.sources import NoSource
from pretrainax.inference.loaded import LoadedModel
from pretrainax.tokenization.base import Tokenizer, Vocabulary

Kind = TypeVar("Kind", bound=Objective)
_TEXT = -1  # placeholder for the ids of a text; not a token id


class Frame(NamedTuple):
    """The ids of the special tokens before and after an input text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def frame_of(loaded: LoadedModel) -> Frame:
    """Returns the special tokens that the model expects around an input text.

    Encoders and models with a task head get the frame of their training documents, such as [CLS] and [SEP]. Other
    models get the special tokens that surround a prompt.
    """
    model = loaded.experiment.model
    if model.family == "encoder" or model.head is not None:  # any family with a task head
        frame = frame_of_texts(model.family, loaded.tokenizer.vocabulary)
        return Frame(frame.before, frame.after)
    prompt = framed_prompt(np.array([_TEXT], np.int32), loaded.experiment, loaded.tokenizer)
    row = prompt["encoder_tokens" if is_encoder_decoder(prompt) else "tokens"].tolist()
    position = row.index(_TEXT)
    return Frame(tuple(row[:position]), tuple(row[position + 1 :]))


def framed_prompt(ids: np.ndarray, experiment: Experiment, tokenizer: Tokenizer) -> Example:
    """Returns the model input for a prompt of n token ids [n]: an example without targets.

    This function is for decoders and encoder-decoders. If the model was trained with a mixture of objectives, the first
    objective determines the format, but the token that marks this objective in training (the mode token) is left out.
    """
    objectives = [objective for _, objective in experiment.objective.components()]
    objective = objectives[0].adapted(experiment).bind(tokenizer) if len(objectives) == 1 else objectives[0]
    if isinstance(objective, CausalLM):
        ids = np.concatenate([before_text(experiment, tokenizer.vocabulary, not len(ids)), ids]).astype(np.int32)
    return objective.prompt(ids, tokenizer.vocabulary)


def before_text(experiment: Experiment, vocabulary: Vocabulary, is_needed: bool) -> list[int]:
    """Returns the ids that a causal decoder reads before a text: a list of one id, or an empty list.

    A decoder that was trained with this package has usually read each document after the separator of the previous
    document. It gets this separator, except if its training rows contained pieces of documents, or if attention was
    masked between documents. An imported decoder gets the BOS token, unless BOS and EOS are the same token.

    Args:
      is_needed: True if the first token of the text needs a token before it, as for scoring or for an empty prompt. An
        imported model without a separate BOS token then reads its separator, such as <|endoftext|>. This token ends
        each document of its training data, and transformers does not add it before prompts.
    """
    if isinstance(experiment.data.source, NoSource):
        if is_needed:
            start = vocabulary.separator if vocabulary.bos is None else vocabulary.bos
        else:
            start = None if vocabulary.bos == vocabulary.eos else vocabulary.bos
    else:
        start = vocabulary.separator if _reads_on(experiment) else None
    return [] if start is None else [start]


def _reads_on(experiment: Experiment) -> bool:
    """Returns True if the model was trained on rows in which a document can follow the end of another document."""
    return any(
        isinstance(objective, CausalLM)
        and not objective.mask_documents
        and not (experiment.data.packing or default_packing(objective)).cuts
        for _, objective in experiment.objective.components()
    )


def find_objective(loaded: LoadedModel, kind: type[Kind]) -> Optional[Kind]:
    """Returns the training objective of class `kind`, alone or as part of a mixture; None if there is none."""
    parts = (part for _, part in loaded.experiment.objective.components())
    return next((part for part in parts if isinstance(part, kind)), None)


def longest(loaded: LoadedModel) -> Optional[int]:
    """Returns the maximum input length in tokens, including special tokens; None if the model has no maximum length."""
    model, tuning = loaded.experiment.model, loaded.experiment.tuning
    return model.position.max_length if tuning is None else min(tuning.limits(model).values(), default=None)


def check_length(
    loaded: LoadedModel, tokens: int, what: str, remedy: str = "shorten it", special: Optional[int] = None
) -> None:
    """Raises UserError if an input is longer than the maximum input length of the model.

    Args:
      tokens: length of the input in tokens, including special tokens.
      what: name of the input in the error message, such as "the prompt".
      remedy: suggestion in the error message.
      special: number of special tokens in the input; None: the number of tokens in `frame_of(loaded)`.
    """
    limit = longest(loaded)
    if limit is not None and tokens > limit:
        special = sum(map(len, frame_of(loaded))) if special is None else special
        raise UserError(
            f"{what} is {tokens - special:,} tokens, {loaded.origin} reads at most {limit - special:,}"
            + (f" and {special} special ones" if special else "")
            + f": {remedy}"
        )


def framed_rows(
    loaded: LoadedModel, texts: Sequence[str], truncate: bool = False, remedy: str = "shorten it"
) -> list[np.ndarray]:
    """Returns the input ids of each text with the special tokens around them, as a list of arrays int32 [t].

    Args:
      truncate: True cuts a text that exceeds the maximum input length at the end. False raises UserError.
      remedy: suggestion in the message of this error.

    Raises:
      UserError: a text has no tokens or too many tokens, or `texts` is a single string.
    """
    if isinstance(texts, str):
        raise UserError("texts is one string, it must be a list of strings: write [text]")
    (before, after), limit = frame_of(loaded), longest(loaded)
    rows = []
    for number, ids in enumerate(loaded.tokenizer.encode_batch(list(texts))):
        if truncate and limit is not None:
            ids = ids[: limit - len(before) - len(after)]
        row = np.concatenate([before, ids, after]).astype(np.int32)
        if not len(row):
            raise UserError(f"texts[{number}] is {texts[number]!r}, which has no tokens: leave it out")
        check_length(loaded, len(row), f"texts[{number}]", remedy)
        rows.append(row)
    return rows


def read_example(loaded: LoadedModel, tokens: np.ndarray) -> Example:
    """Builds a model input from token ids [n] as a single document.

    An encoder-decoder receives the document as encoder input.
    """
    prefix = "encoder_" if loaded.experiment.model.family == "encoder_decoder" else ""
    example = {
        f"{prefix}tokens": tokens.astype(np.int32),
        f"{prefix}segment_ids": np.ones(len(tokens), np.int32),
        f"{prefix}positions": np.arange(len(tokens), dtype=np.int32),
    }
    if loaded.experiment.model.num_token_types:
        example["token_types"] = np.zeros(len(tokens), np.int32)
    return example
