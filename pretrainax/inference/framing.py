"""Puts around a text what stands there in training, so that a model is asked about what it knows."""

from collections.abc import Sequence
from typing import NamedTuple, Optional, TypeVar

import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.batch import Example, is_encoder_decoder
from pretrainax.data.framing import frame_of as frame_of_texts
from pretrainax.data.objectives import CausalLM, Objective
from pretrainax.data.row_stream import default_packing
from pretrainax.data.sources import NoSource
from pretrainax.inference.loaded import LoadedModel
from pretrainax.tokenization.base import Tokenizer, Vocabulary

Kind = TypeVar("Kind", bound=Objective)
_TEXT = -1  # no token: stands for a text


class Frame(NamedTuple):
    """The special tokens before and after a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def frame_of(loaded: LoadedModel) -> Frame:
    """Returns what stands around a text that `loaded` reads: [CLS] and [SEP], or what stands around its prompts."""
    model = loaded.experiment.model
    if model.family == "encoder" or model.head is not None:  # with the head of a task, of whatever family
        frame = frame_of_texts(model.family, loaded.tokenizer.vocabulary)
        return Frame(frame.before, frame.after)
    prompt = framed_prompt(np.array([_TEXT], np.int32), loaded.experiment, loaded.tokenizer)
    row = prompt["encoder_tokens" if is_encoder_decoder(prompt) else "tokens"].tolist()
    place = row.index(_TEXT)
    return Frame(tuple(row[:place]), tuple(row[place + 1 :]))


def framed_prompt(ids: np.ndarray, experiment: Experiment, tokenizer: Tokenizer) -> Example:
    """Returns what a decoder or an encoder-decoder reads of the ids [n] of a text: an example without predictions.

    Of several objectives the first one says it, without the mode that tells them apart.
    """
    objectives = [objective for _, objective in experiment.objective.components()]
    objective = objectives[0].adapted(experiment).bind(tokenizer) if len(objectives) == 1 else objectives[0]
    if isinstance(objective, CausalLM):
        ids = np.concatenate([before_text(experiment, tokenizer.vocabulary, not len(ids)), ids]).astype(np.int32)
    return objective.prompt(ids, tokenizer.vocabulary)


def before_text(experiment: Experiment, vocabulary: Vocabulary, is_needed: bool) -> list[int]:
    """Returns the ids that stand before a text that a decoder reads from left to right: one, or none.

    A decoder of ours has read documents one after the other, each after the separator of the one before, unless its
    rows hold pieces of documents or it sees no other document. One of others reads what their tokenizer puts there.

    Args:
      is_needed: something has to be read before the first token of the text: where that is asked for (scores), or
        there is none (an empty prompt). Then the text of a model of others begins with <|endoftext|> too, which ends
        each document of its training, and which transformers puts before no prompt.
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
    """Returns True if a text was seen after the end of another one in training."""
    return any(
        isinstance(objective, CausalLM)
        and not objective.mask_documents
        and not (experiment.data.packing or default_packing(objective)).cuts
        for _, objective in experiment.objective.components()
    )


def trained_by(loaded: LoadedModel, kind: type[Kind]) -> Optional[Kind]:
    """Returns the objective of this kind that the model was trained by, alone or in a mixture; None without one."""
    parts = (part for _, part in loaded.experiment.objective.components())
    return next((part for part in parts if isinstance(part, kind)), None)


def longest(loaded: LoadedModel) -> Optional[int]:
    """Returns how many tokens the model reads, special ones included; None where its positions set no limit."""
    model, tuning = loaded.experiment.model, loaded.experiment.tuning
    return model.position.max_length if tuning is None else min(tuning.limits(model).values(), default=None)


def check_length(
    loaded: LoadedModel, tokens: int, what: str, remedy: str = "shorten it", special: Optional[int] = None
) -> None:
    """Raises UserError where `what` has more tokens than the model reads, `special` ones included; None: its frame."""
    most = longest(loaded)
    if most is not None and tokens > most:
        special = sum(map(len, frame_of(loaded))) if special is None else special
        raise UserError(
            f"{what} is {tokens - special:,} tokens, {loaded.origin} reads at most {most - special:,}"
            + (f" and {special} special ones" if special else "")
            + f": {remedy}"
        )


def framed_rows(
    loaded: LoadedModel, texts: Sequence[str], truncate: bool = False, remedy: str = "shorten it"
) -> list[np.ndarray]:
    """Returns the ids that the model reads of each text, n times int32 [t], those that stand around it included.

    Args:
      truncate: of a text that is too long the first part is read; else it is an error, which says `remedy`.

    Raises:
      UserError: a text without tokens, or with too many; one text in place of a list.
    """
    if isinstance(texts, str):
        raise UserError("texts is one text, it must be a list of them: write [text]")
    (before, after), most = frame_of(loaded), longest(loaded)
    rows = []
    for number, ids in enumerate(loaded.tokenizer.encode_batch(list(texts))):
        if truncate and most is not None:
            ids = ids[: most - len(before) - len(after)]
        row = np.concatenate([before, ids, after]).astype(np.int32)
        if not len(row):
            raise UserError(f"texts[{number}] is {texts[number]!r}, which has no tokens: leave it out")
        check_length(loaded, len(row), f"texts[{number}]", remedy)
        rows.append(row)
    return rows


def read_example(loaded: LoadedModel, tokens: np.ndarray) -> Example:
    """Returns the example of a row [n] that the model reads, or of two stacks its encoder."""
    side = "encoder_" if loaded.experiment.model.family == "encoder_decoder" else ""
    example = {
        f"{side}tokens": tokens.astype(np.int32),
        f"{side}segment_ids": np.ones(len(tokens), np.int32),
        f"{side}positions": np.arange(len(tokens), dtype=np.int32),
    }
    if loaded.experiment.model.num_token_types:
        example["token_types"] = np.zeros(len(tokens), np.int32)
    return example
