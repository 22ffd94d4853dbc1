"""Adds the special tokens of training around a text, so that inputs at inference match the training data."""

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
_TEXT = -1  # placeholder for a text; not a token id


class Frame(NamedTuple):
    """The special tokens before and after a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def frame_of(loaded: LoadedModel) -> Frame:
    """Returns the special tokens around an input text: [CLS] and [SEP], or the special tokens around a prompt."""
    model = loaded.experiment.model
    if model.family == "encoder" or model.head is not None:  # any family with a task head
        frame = frame_of_texts(model.family, loaded.tokenizer.vocabulary)
        return Frame(frame.before, frame.after)
    prompt = framed_prompt(np.array([_TEXT], np.int32), loaded.experiment, loaded.tokenizer)
    row = prompt["encoder_tokens" if is_encoder_decoder(prompt) else "tokens"].tolist()
    position = row.index(_TEXT)
    return Frame(tuple(row[:position]), tuple(row[position + 1 :]))


def framed_prompt(ids: np.ndarray, experiment: Experiment, tokenizer: Tokenizer) -> Example:
    """Returns the input of a decoder or an encoder-decoder for the ids [n] of a text: an example without targets.

    In a mixture, the first objective determines the format, without its mode token.
    """
    objectives = [objective for _, objective in experiment.objective.components()]
    objective = objectives[0].adapted(experiment).bind(tokenizer) if len(objectives) == 1 else objectives[0]
    if isinstance(objective, CausalLM):
        ids = np.concatenate([before_text(experiment, tokenizer.vocabulary, not len(ids)), ids]).astype(np.int32)
    return objective.prompt(ids, tokenizer.vocabulary)


def before_text(experiment: Experiment, vocabulary: Vocabulary, is_needed: bool) -> list[int]:
    """Returns the ids before a text that a causal decoder reads: one id, or none.

    A decoder trained here has read each document after the separator of the previous document, unless its rows hold
    pieces of documents or attention is masked between documents. An imported decoder reads the BOS token that its
    tokenizer adds.

    Args:
      is_needed: the first token of the text needs a token before it, as for scoring or for an empty prompt. Imported
        models then also read <|endoftext|>. This token ends each document of their training data, and transformers
        does not add it before prompts.
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
    """Returns True if the model was trained on documents that follow the end of another document."""
    return any(
        isinstance(objective, CausalLM)
        and not objective.mask_documents
        and not (experiment.data.packing or default_packing(objective)).cuts
        for _, objective in experiment.objective.components()
    )


def trained_by(loaded: LoadedModel, kind: type[Kind]) -> Optional[Kind]:
    """Returns the training objective of this kind, alone or from a mixture; None if there is none."""
    parts = (part for _, part in loaded.experiment.objective.components())
    return next((part for part in parts if isinstance(part, kind)), None)


def longest(loaded: LoadedModel) -> Optional[int]:
    """Returns the maximum input length in tokens, with special tokens; None if the positions set no limit."""
    model, tuning = loaded.experiment.model, loaded.experiment.tuning
    return model.position.max_length if tuning is None else min(tuning.limits(model).values(), default=None)


def check_length(
    loaded: LoadedModel, tokens: int, what: str, remedy: str = "shorten it", special: Optional[int] = None
) -> None:
    """Raises UserError if `what` exceeds the maximum input length.

    Args:
      tokens: length of `what`, including special tokens.
      special: number of special tokens in it; None: those of `special_token_frame`.
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
    """Returns the input ids of each text with their special tokens, n arrays int32 [t].

    Args:
      truncate: cuts long texts at the end; otherwise a long text raises an error that suggests `remedy`.

    Raises:
      UserError: a text has no tokens or too many, or `texts` is a string.
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
    """Returns an example of the ids [n]; an encoder-decoder reads them with its encoder."""
    prefix = "encoder_" if loaded.experiment.model.family == "encoder_decoder" else ""
    example = {
        f"{prefix}tokens": tokens.astype(np.int32),
        f"{prefix}segment_ids": np.ones(len(tokens), np.int32),
        f"{prefix}positions": np.arange(len(tokens), dtype=np.int32),
    }
    if loaded.experiment.model.num_token_types:
        example["token_types"] = np.zeros(len(tokens), np.int32)
    return example
