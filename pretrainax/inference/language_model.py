"""The face of a loaded model in Python: `LanguageModel`, which `pretrainax.load` returns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import jax
import numpy as np

from pretrainax.config import ModelConfig, UserError, nearest
from pretrainax.data.batch import HostBatch
from pretrainax.files.json_files import JsonObject
from pretrainax.inference.answers import predict, task_of
from pretrainax.inference.decoding import Generated, OnText, generate
from pretrainax.inference.embed import Pooling, embed
from pretrainax.inference.fill import Filled, Order, fill
from pretrainax.inference.framing import framed_prompt, framed_rows, longest, read_example
from pretrainax.inference.loaded import LoadedModel
from pretrainax.inference.prompts import batch_of
from pretrainax.inference.request import Sampling
from pretrainax.sharding.param_paths import parameter_names

if TYPE_CHECKING:
    from pretrainax.scoring.likelihood import Score


@dataclasses.dataclass(frozen=True, repr=False)
class LanguageModel(LoadedModel):
    """Answers what a user asks of a trained model; docs/use.md shows each method.

    `model(batch)` gives the outputs for a batch as data/batch.py describes it, which `encode` makes of texts.
    """

    generator: Optional["LanguageModel"] = None  # of ELECTRA: the masked LM beside this discriminator

    @property
    def config(self) -> ModelConfig:
        """The sizes and the architecture. `experiment` is all of the run's config.json."""
        return self.experiment.model

    @property
    def parameters(self) -> dict[str, jax.Array]:
        """All parameters by their paths, float32, as they lie on the mesh."""
        return dict(zip(parameter_names(self.params), jax.tree.leaves(self.params), strict=True))

    def encode(self, texts: Sequence[str]) -> HostBatch:
        """Returns the batch of texts, [B, T] int32 each, padded on the right to one of few lengths.

        The special tokens of the training stand around a text. Of an encoder-decoder the encoder reads the texts, and
        the decoder the one token [B, 1] that it starts from.

        Raises:
          UserError: a text without tokens, or with more than the model reads.
        """
        examples = [read_example(self, row) for row in framed_rows(self, texts)]
        if self.config.family == "encoder_decoder":
            nothing = framed_prompt(np.zeros(0, np.int32), self.experiment, self.tokenizer)
            examples = [nothing | example for example in examples]
        return batch_of(examples, self.tokenizer.vocabulary.pad or 0, longest(self))

    def generate(
        self,
        prompts: Union[str, Sequence[str]],
        *,
        on_text: Optional[OnText] = None,
        **sampling: Any,
    ) -> list[Generated]:
        """Returns the texts that the model writes after one prompt, or after each of several, prompt by prompt.

        Args:
          on_text: is told of each piece of text when it is there.
          sampling: fields of `inference.request.Sampling`, as max_new_tokens=40, temperature=0.8, stop=("\\n",).

        Raises:
          UserError: an option that there is not, or out of range; a prompt that is too long; an encoder.
        """
        fields = [field.name for field in dataclasses.fields(Sampling)]
        if unknown := [name for name in sampling if name not in fields]:
            raise UserError(f"generate has no option {unknown[0]!r}, {nearest(unknown[0], fields)}")
        listed = [prompts] if isinstance(prompts, str) else prompts
        return generate(self, listed, Sampling(**sampling), on_text)

    def fill(
        self, text: str, top: int = 5, order: Optional[Order] = None, max_new_tokens: Optional[int] = None
    ) -> Filled:
        """Returns a text with its holes filled in, and the `top` likeliest fillings of each; see `inference.fill.fill`.

        A hole is written [MASK]. Of ELECTRA the generator is asked.
        """
        return fill(self.generator or self, text, top, order, max_new_tokens)

    def embed(self, texts: Sequence[str], pooling: Optional[Pooling] = None, truncate: bool = False) -> np.ndarray:
        """Returns a vector of each text, [n, d_model] float32; see `inference.embed.embed`."""
        return embed(self, texts, pooling, truncate)

    def predict(self, records: Sequence[Union[str, Mapping]], batch_size: int = 32) -> list[JsonObject]:
        """Returns what a model with the head of a task says of each record, as {"prediction": …, "probabilities": …}.

        Args:
          records: with the fields that the task reads, without a label; of a task of one text, texts.
          batch_size: rows that the model reads at a time.

        Raises:
          UserError: a model without such a head; a record that lacks a field.
        """
        task = task_of(self)
        fields = ({task.fields[0]: record} if isinstance(record, str) else record for record in records)
        try:
            return list(predict(self, task, fields, batch_size))
        except ValueError as e:
            raise UserError(f"a record cannot be read: {e}") from e

    def score(
        self,
        texts: Sequence[Union[str, tuple[str, str]]],
        *,
        context: Optional[int] = None,
        stride: Optional[int] = None,
        by_word: bool = False,
        seed: Optional[int] = None,
    ) -> list["Score"]:
        """Returns nats, tokens and bytes of each text, and how they were counted; see `scoring.likelihood.score`.

        Of ELECTRA the generator is asked.
        """
        from pretrainax.scoring.likelihood import score  # scoring builds on this package

        return score(self.generator or self, texts, context=context, stride=stride, by_word=by_word, seed=seed)
