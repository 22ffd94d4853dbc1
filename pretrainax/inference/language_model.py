"""The Python API of loaded models: the class `LanguageModel`, which `pretrainax.load` returns."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import jax
import numpy as np

from pretrainax.config import ModelConfig, UserError, nearest
from pretrainax.data.batch import HostBatch
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.decoding import Generated, OnText, generate
from pretrainax.inference.embed import Pooling, embed
from pretrainax.inference.fill import Filled, Order, fill
from pretrainax.inference.framing import framed_prompt, framed_rows, max_input_length, read_example
from pretrainax.inference.inherited import request_of
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.predictions import predict, task_of
from pretrainax.inference.prompts import batch_of
from pretrainax.inference.request import Sampling
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.storage.store import print_message
from pretrainax.tasks import Task

if TYPE_CHECKING:
    from pretrainax.scoring.likelihood import Score


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel(LoadedModel):
    """A trained model for inference; docs/how-to/load.md shows each method.

    `model(batch)` returns the model outputs for a batch in the format of data/batch.py. The method `encode` converts
    strings to a batch.
    """

    generator: Optional["LanguageModel"] = None  # for the discriminator of ELECTRA: its masked LM

    @property
    def config(self) -> ModelConfig:
        """Returns the model config; the field `experiment` contains the complete config of the run."""
        return self.experiment.model

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """Returns all parameters by path, as float32 arrays with shardings over the mesh."""
        return dict(zip(parameter_names(self.params), jax.tree.leaves(self.params), strict=True))

    def encode(self, texts: Sequence[str]) -> HostBatch:
        """Tokenizes strings to a batch of int32 arrays [B, T], padded on the right to a length from `rows.bucket`.

        Each string gets the special tokens of training. For an encoder-decoder, the strings are the encoder input, and
        the decoder input is the start token.

        Raises:
          UserError: there is no string, or a string has no tokens or more than the maximum input length.
        """
        if not (rows := framed_rows(self, texts)):
            raise UserError("texts is empty, it must have at least one string")
        examples = [read_example(self, row) for row in rows]
        if self.config.family == "encoder_decoder":
            empty_prompt = framed_prompt(np.zeros(0, np.int32), self.experiment, self.tokenizer)
            examples = [empty_prompt | example for example in examples]
        return batch_of(examples, self.tokenizer.vocabulary.pad or 0, max_input_length(self))

    def generate(
        self,
        prompts: Union[str, Sequence[str]],
        *,
        on_text: Optional[OnText] = None,
        ignore: Sequence[str] = (),
        **sampling: Any,
    ) -> list[Generated]:
        """Generates text after one or more prompts; returns the results in the order of the prompts.

        The settings in the generation_config.json of an imported model are the defaults of the options. A message on
        stderr lists them.

        Args:
          prompts: a string, or a list of strings.
          on_text: called with the index of a prompt and the new characters of its generated text.
          ignore: fields of generation_config.json to ignore, for example ("top_k",); ("all",) ignores all settings.
          sampling: fields of `inference.request.Sampling`: max_new_tokens=40, temperature=0.8, stop=("\\n",), ….

        Raises:
          UserError: an option is unknown or out of range, a prompt is too long, or the model is an encoder.
        """
        fields = [field.name for field in dataclasses.fields(Sampling)]
        if unknown := [name for name in sampling if name not in fields]:
            raise UserError(f"generate has no option {unknown[0]!r}, {nearest(unknown[0], fields)}")
        prompt_list = [prompts] if isinstance(prompts, str) else prompts
        request = request_of(self, sampling, ignore)
        for note in request.notes:
            self._print_once(note)
        return generate(self, prompt_list, request.sampling, on_text)

    @functools.cached_property
    def _print_once(self) -> Callable[[str], None]:
        return functools.cache(print_message)

    def fill(
        self, text: str, top: int = 5, order: Optional[Order] = None, max_new_tokens: Optional[int] = None
    ) -> Filled:
        """Fills the holes in a text, and returns the `top` candidates for each hole; see `inference.fill.fill`.

        A hole is written as [MASK]. An ELECTRA model fills the holes with its generator.
        """
        return fill(self.generator or self, text, top, order, max_new_tokens)

    def embed(self, texts: Sequence[str], pooling: Optional[Pooling] = None, truncate: bool = False) -> np.ndarray:
        """Computes the embedding of each text, float32 [n, d_model]; see `inference.embed.embed`."""
        return embed(self, texts, pooling, truncate)

    def predict(self, records: Sequence[Union[str, Mapping]], batch_size: int = 32) -> list[JsonObject]:
        """Returns the task head's prediction for each record, for example {"prediction": …, "probabilities": …}.

        Args:
          records: mappings with the fields that the task reads, without a label. A record may also be a string, the
            value of the task's first field.
          batch_size: maximum number of rows per batch.

        Raises:
          UserError: the model has no task head, a record lacks a field, `records` is a single record, or `batch_size`
            is below 1.
        """
        if isinstance(records, (str, Mapping)):
            raise UserError("records is one record, it must be a list of records: write [record]")
        if not (isinstance(batch_size, numbers.Integral) and batch_size >= 1):
            raise UserError(f"batch_size is {batch_size!r}, it must be a whole number from 1")
        task = task_of(self)
        fields = (_fields_of(record, task) for record in records)
        try:
            return list(predict(self, task, fields, batch_size))
        except ValueError as e:
            raise UserError(f"a record is invalid: {e}") from e

    def score(
        self,
        texts: Sequence[Union[str, tuple[str, str]]],
        *,
        context: Optional[int] = None,
        stride: Optional[int] = None,
        by_word: bool = False,
        seed: Optional[int] = None,
    ) -> list["Score"]:
        """Computes the negative log-likelihood of each text in nats, and counts its tokens and bytes.

        The function `scoring.likelihood.score` documents the options. An ELECTRA model scores with its generator.
        """
        from pretrainax.scoring.likelihood import score  # not at the top of the file: scoring imports this package

        return score(self.generator or self, texts, context=context, stride=stride, by_word=by_word, seed=seed)


def _fields_of(record: Union[str, Mapping], task: Task) -> Mapping:
    """Returns the fields of a record; a string is the value of the task's first field."""
    if isinstance(record, str):
        return {task.fields[0]: record}
    if not isinstance(record, Mapping):
        raise UserError(f"a record is {record!r:.80}, it must be a string or a dict of fields")
    return record
