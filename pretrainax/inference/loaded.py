"""A trained model in device memory, ready for inference: config, parameters, tokenizer and mesh."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Optional, Self, TypeVar, cast

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrainax.adapt import Adapted
from pretrainax.config import Embed, Experiment, ModelConfig, UserError
from pretrainax.data.batch import Batch
from pretrainax.data.token_inputs import token_inputs, with_token_inputs
from pretrainax.interop.generation import GenerationFile
from pretrainax.models import AnyModel, Outputs
from pretrainax.models.outputs import hidden_states
from pretrainax.reporting.units import large_number
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.mesh import axis_size
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tokenization.base import Tokenizer

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model with its config, parameters, tokenizer and mesh.

    `inference.load.load` creates a LoadedModel from a directory. During training, a run creates
    a LoadedModel from its current parameters for evaluation.
    """

    experiment: Experiment  # config of the run or of the imported model; fields of `model` are not "auto"
    model: AnyModel  # in an ELECTRA run: discriminator and generator, which `load` separates
    params: PyTree  # float32, sharded
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    origin: str  # description for messages: "runs/mine, step 2,000"
    ends: Optional[tuple[int, ...]] = None  # ids that end a generated text; None: the separator of the vocabulary
    generation: Optional[GenerationFile] = None  # generation settings of an imported model that was not trained further
    # Called for each batch and each chunk of tokens, for the watchdog of a run.
    progress: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        """Formats the class, origin, family, parameter count, vocabulary size and devices on one line."""
        model, devices = self.experiment.model, f"{self.mesh.size} × {self.mesh.devices.flat[0].device_kind}"
        num_params = sum(x.size for x in jax.tree.leaves(self.params))
        shape = f"{model.family}, {large_number(num_params)} parameters, {model.vocab_size:,} ids"
        return f"{type(self).__name__}({self.origin}: {shape}, {devices})"

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids that end a generated text; () if the model has none."""
        separator = self.tokenizer.vocabulary.separator
        return self.ends if self.ends is not None else () if separator is None else (separator,)

    def __call__(self, batch: Mapping[str, np.ndarray], hidden: bool = False) -> Outputs:
        """Computes the model outputs for a batch, without dropout; compiled once per set of array shapes.

        Args:
          batch: arrays in the format of data/batch.py.
          hidden: whether to add `.hidden` to the outputs: the hidden states after each block of each stack, [L, B, T,
            D]. If True, the model must be a single encoder, decoder or encoder-decoder.

        Returns:
          Outputs with `.logits`, [B, N, V] float32.
        """
        if hidden:
            self.check_plain("give hidden states")
        return self.run(_with_hidden, batch) if hidden else self.compute(_return_outputs, batch)

    def compute(self, question: Callable[[Outputs, Batch], Result], batch: Mapping[str, np.ndarray]) -> Result:
        """Computes `question(outputs, batch)`, where `outputs` are the model outputs for the batch.

        The model and `question` are jitted together, so that device memory holds the result of `question`, but not the
        complete outputs.

        Args:
          question: a module-level function of outputs and batch. It is compiled once per set of array shapes.
          batch: arrays in the format of data/batch.py.
        """
        return self.run(_on_outputs(question), batch)

    def run(self, work: Callable[[AnyModel, PyTree, Batch], Result], batch: Mapping[str, np.ndarray]) -> Result:
        """Computes `work(model, params, batch)`, jitted, for results that `compute` cannot derive from `Outputs`."""
        self.progress()
        with jax.set_mesh(self.mesh):
            return self._compiled(work)(self.params, self._put_on_devices(with_token_inputs(batch, self._token_inputs)))

    def keep(self, make: Callable[["LoadedModel"], Result]) -> Result:
        """Computes `make(self)` and caches the result, for example a copy of the parameters in another layout."""
        return cast(Result, self._cache(make))

    @functools.cached_property
    def _cache(self) -> Callable[[Callable[["LoadedModel"], object]], object]:
        return functools.cache(lambda make: make(self))

    def cached_across_checkpoints(self, make: Callable[["LoadedModel"], Result]) -> Result:
        """Computes `make(model)`, and caches the result for all checkpoints of a run.

        `make` receives this model with `params=None`. It must return jitted functions that take the parameters as an
        argument.
        """
        return cast(Result, self._shared_cache(make))

    @functools.cached_property
    def _shared_cache(self) -> Callable[[Callable[["LoadedModel"], object]], object]:
        bare = dataclasses.replace(self, params=None)
        return functools.cache(lambda make: make(bare))

    def clear_cache(self) -> None:
        """Frees the results that `keep` cached, for example the copy of the parameters for text generation."""
        self.__dict__.pop("_cache", None)

    def share_compiled(self, other: Self) -> Self:
        """Reuses the compiled functions of `other` if its model and mesh are equal; returns this model.

        They are equal for the checkpoints of one phase of a run. Another phase can have another model config.
        """
        if self.model == other.model and self.mesh == other.mesh:
            self.__dict__["_compiled"], self.__dict__["_shared_cache"] = other._compiled, other._shared_cache
        return self

    def check_plain(self, purpose: str) -> None:
        """Raises UserError if the model has parameter-efficient tuning that cannot be merged into the base model.

        Args:
          purpose: operation that needs a merged model, for the message: "write text".
        """
        if isinstance(self.model, Adapted):
            raise UserError(
                f"{self.origin} is a model with {self.model.tuning}, which supports evaluate, score and predict; it "
                f"cannot {purpose}: for that, tune it by LoRA"
            )

    def _put_on_devices(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Moves a batch to the devices: shards the rows if the mesh divides their number, or else replicates them."""
        if len(next(iter(batch.values()))) % axis_size(BATCH_AXES):
            return jax.device_put(dict(batch), NamedSharding(self.mesh, PartitionSpec()))
        return put_batch(batch, self.mesh)

    @functools.cached_property
    def _token_inputs(self) -> dict[str, np.ndarray]:
        return token_inputs(self.experiment.model, self.tokenizer)

    @functools.cached_property
    def _compiled(self) -> Callable[[Callable[..., PyTree]], Callable[..., PyTree]]:
        model = self.model  # not `self`: models that share the functions would keep the parameters of `self` in memory
        return functools.cache(lambda work: jax.jit(functools.partial(work, model)))


@functools.cache
def _on_outputs(question: Callable[[Outputs, Batch], Result]) -> Callable[[AnyModel, PyTree, Batch], Result]:
    return lambda model, params, batch: question(model.apply({"params": params}, batch, deterministic=True), batch)


def _return_outputs(outputs: Outputs, batch: Batch) -> Outputs:
    return outputs


def _with_hidden(model: AnyModel, params: PyTree, batch: Batch) -> Outputs:
    module = cast(nn.Module, model)  # not `Electra`, which consists of two encoders
    outputs, state = module.apply({"params": params}, batch, deterministic=True, mutable=["intermediates"])
    return outputs.replace(hidden=hidden_states(state["intermediates"]))


def without_capacity(config: ModelConfig) -> ModelConfig:
    """Removes the capacity of the experts, so that the outputs for a row do not depend on the other rows."""
    if config.experts is None:
        return config
    return dataclasses.replace(config, experts=dataclasses.replace(config.experts, capacity=None))


def check_language_model(loaded: LoadedModel) -> None:
    """Raises UserError if the model has a task head instead of a language-model head."""
    if (head := loaded.experiment.model.head) is not None:
        raise UserError(
            f"{loaded.origin} has the task head {head} and no language-model head: it cannot generate, fill in or "
            f"score text; it supports {'embed' if isinstance(head, Embed) else 'predict'} and evaluate"
        )
