"""Adds the special tokens of training to an input text, so that inference inputs have the training format."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional, TypeVar

import numpy as np

from pretrainax.config import Experiment, UserError
from pretrainax.data.batch import Example, is_encoder_decoder
from pretrainax.data.framing import special_token_frame as frame_of_texts
from pretrainax.data.leading_tokens import is_imported, leading_token_ids
from pretrainax.data.objectives import CausalLM, Objective
from pretrainax.data.objectives.spans import encoder_decoder_prompt
from pretrainax.files.errors import counted
from pretrainax.inference.loaded import LoadedModel
from pretrainax.tokenization.base import Tokenizer, Vocabulary

Kind = TypeVar("Kind", bound=Objective)
Text = TypeVar("Text")
_PLACEHOLDER = -1  # stands for the token ids of a text in a prompt; not a valid token id


class Frame(NamedTuple):
    """The special token ids before and after an input text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def frame_of(loaded: LoadedModel) -> Frame:
    """Returns the special tokens that the model expects before and after an input text.

    For encoders and for models with a task head, these are the special tokens of training documents ([CLS], [SEP]). For
    other models, these are the special tokens before and after a prompt.
    """
    model = loaded.experiment.model
    if model.family == "encoder" or model.head is not None:  # any family with a task head
        frame = frame_of_texts(model.family, loaded.tokenizer.vocabulary).single
        return Frame(frame.before, frame.after)
    prompt = framed_prompt(np.array([_PLACEHOLDER], np.int32), loaded.experiment, loaded.tokenizer)
    row = prompt["encoder_tokens" if is_encoder_decoder(prompt) else "tokens"].tolist()
    position = row.index(_PLACEHOLDER)
    return Frame(tuple(row[:position]), tuple(row[position + 1 :]))


def framed_prompt(ids: np.ndarray, experiment: Experiment, tokenizer: Tokenizer) -> Example:
    """Builds the input of a decoder or encoder-decoder for a prompt: an example without targets.

    The prompt of an imported model has the special tokens that its tokenizer adds, as in transformers. The prompt of
    other models has the format of training. If a model was trained with a mixture of objectives, the first objective
    determines the format. The input omits the mode token, which selects the objective in training.

    Args:
      ids: token ids of the prompt, [n].
    """
    objectives = [objective for _, objective in experiment.objective.components()]
    objective = objectives[0].adapted(experiment).bind(tokenizer) if len(objectives) == 1 else objectives[0]
    vocabulary = tokenizer.vocabulary
    if isinstance(objective, CausalLM):
        after = trailing_token_ids(experiment, vocabulary)
        before = leading_token_ids(experiment, vocabulary, not len(ids) and not after)
        ids = np.concatenate([before, ids, after]).astype(np.int32)
    return objective_prompt(objective, ids, experiment, vocabulary)


def objective_prompt(objective: Objective, ids: np.ndarray, experiment: Experiment, vocabulary: Vocabulary) -> Example:
    """Builds the input of `Objective.prompt`; the encoder of an imported model reads the tokenizer's own frame."""
    prompt = objective.prompt(ids, vocabulary)
    if is_encoder_decoder(prompt) and is_imported(experiment) and vocabulary.frame is not None:
        return encoder_decoder_prompt(vocabulary.frame.wrap([ids])[0], int(prompt["tokens"][0]))
    return prompt


def trailing_token_ids(experiment: Experiment, vocabulary: Vocabulary) -> list[int]:
    """Returns the token ids that the tokenizer of an imported causal decoder adds after a text; [] for other models."""
    return list(vocabulary.frame.single.after) if is_imported(experiment) and vocabulary.frame is not None else []


def find_objective(loaded: LoadedModel, kind: type[Kind]) -> Optional[Kind]:
    """Returns the training objective of class `kind`, possibly as part of a mixture, or None if there is none."""
    components = (component for _, component in loaded.experiment.objective.components())
    return next((component for component in components if isinstance(component, kind)), None)


def max_input_length(loaded: LoadedModel) -> Optional[int]:
    """Returns the maximum input length in tokens, including special tokens, or None if there is no limit."""
    model, tuning = loaded.experiment.model, loaded.experiment.tuning
    return model.position.max_length if tuning is None else min(tuning.limits(model).values(), default=None)


def check_length(
    loaded: LoadedModel,
    tokens: int,
    what: str,
    remedy: str = "shorten it",
    special: Optional[int] = None,
    limit: Optional[int] = None,
) -> None:
    """Raises UserError if an input exceeds the maximum input length of the model.

    Args:
      tokens: length of the input in tokens, including special tokens.
      what: name of the input in the error message, for example "the prompt".
      remedy: suggestion in the error message.
      special: number of special tokens in the input. If None, it is their number in `frame_of(loaded)`.
      limit: maximum number of tokens. If None, it is `max_input_length(loaded)`.
    """
    limit = max_input_length(loaded) if limit is None else limit
    if limit is not None and tokens > limit:
        special = sum(map(len, frame_of(loaded))) if special is None else special
        raise UserError(
            f"{what} is {tokens - special:,} tokens, {loaded.origin} reads at most {limit - special:,}"
            + (f" and {special} special ones" if special else "")
            + f": {remedy}"
        )


def checked_texts(texts: Iterable[Text], name: str = "texts", pairs: bool = False) -> list[Text]:
    """Returns the texts as a list.

    Args:
      name: name of the argument for the message.
      pairs: whether an item may also be a pair of strings (source, target).

    Raises:
      UserError: `texts` is a single string, or an item is no string.
    """
    if isinstance(texts, str):
        raise UserError(f"{name} is one string, it must be a list of strings: write [text]")
    items = list(texts)
    for number, text in enumerate(items):
        is_pair = pairs and isinstance(text, tuple) and len(text) == 2 and all(isinstance(x, str) for x in text)
        if not (isinstance(text, str) or is_pair):
            kinds = "a string or a tuple of two strings (source, target)" if pairs else "a string"
            raise UserError(f"{name}[{number}] is {text!r:.80}, it must be {kinds}")
    return items


def framed_rows(
    loaded: LoadedModel,
    texts: Sequence[str],
    truncate: bool = False,
    remedy: str = "shorten it",
    limit: Optional[int] = None,
) -> list[np.ndarray]:
    """Tokenizes each text and adds the special tokens of training; returns a list of int32 arrays [t].

    Args:
      truncate: whether to cut a text at the end if it exceeds the maximum input length. If False, a text that is
        too long raises UserError.
      remedy: suggestion in the error message for a text that is too long.
      limit: maximum number of tokens, if it is smaller than the model's.

    Raises:
      UserError: a text has no tokens or too many tokens, the limit leaves no room for special tokens, or `texts` is no
        list of strings.
    """
    texts = checked_texts(texts)
    before, after = frame_of(loaded)
    limits = [x for x in (limit, max_input_length(loaded)) if x is not None]
    limit, rows, special = min(limits, default=None), [], len(before) + len(after)
    if limit is not None and limit < special:
        raise UserError(
            f"{loaded.origin} reads at most {counted(limit, 'token')}, but {special} special tokens surround each "
            "text: raise its maximum length (max_seq_length or model_max_length in its files)"
        )
    for number, ids in enumerate(loaded.tokenizer.encode_batch(texts)):
        if truncate and limit is not None:
            ids = ids[: limit - special]
        row = np.concatenate([before, ids, after]).astype(np.int32)
        if not len(row):
            raise UserError(f"texts[{number}] is {texts[number]!r}, which has no tokens: leave it out")
        check_length(loaded, len(row), f"texts[{number}]", remedy, limit=limit)
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
