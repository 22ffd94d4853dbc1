"""A model that is ready for inference: config, parameters and tokenizer, on a mesh of devices."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Self, TypeVar, cast

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrainax.adapt import Adapted
from pretrainax.config import Experiment, UserError
from pretrainax.data.batch import Batch
from pretrainax.data.token_inputs import token_inputs, with_token_inputs
from pretrainax.models import AnyModel, Outputs
from pretrainax.models.outputs import hidden_states
from pretrainax.reporting.units import large_number
from pretrainax.sharding.arrays import put_batch
from pretrainax.sharding.axes import BATCH_AXES
from pretrainax.sharding.mesh import axis_size
from pretrainax.sharding.param_paths import PyTree
from pretrainax.tokenization.base import Tokenizer

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model with its config, parameters, tokenizer and mesh.

    `inference.load.load` creates it from a directory. A run creates it from the model that it trains, for evaluation
    during training.
    """

    experiment: Experiment  # config of the run or of the imported model; fields of `model` are not "auto"
    model: AnyModel  # in an ELECTRA run, discriminator and generator; `load` separates them
    params: PyTree  # float32, sharded
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    origin: str  # description for messages: "runs/mine, step 2,000"

    def __repr__(self) -> str:
        """Returns a line with the class, origin, family, parameter count, vocabulary size and devices."""
        model, devices = self.experiment.model, f"{self.mesh.size} × {self.mesh.devices.flat[0].device_kind}"
        numbers = sum(x.size for x in jax.tree.leaves(self.params))
        shape = f"{model.family}, {large_number(numbers)} parameters, {model.vocab_size:,} ids"
        return f"{type(self).__name__}({self.origin}: {shape}, {devices})"

    def __call__(self, batch: Mapping[str, np.ndarray], hidden: bool = False) -> Outputs:
        """Returns the model outputs for a batch, without dropout; compiled once per set of array shapes.

        Args:
          batch: arrays in the format of data/batch.py.
          hidden: True adds `.hidden` to the outputs: the residual stream after each block of each stack, [L, B, T, D].
            This needs a model that is one encoder, decoder or encoder-decoder.

        Returns:
          Outputs with `.logits`, [B, N, V] float32.
        """
        if hidden:
            self.check_plain("give hidden states")
        return self.run(_with_hidden, batch) if hidden else self.compute(_outputs, batch)

    def compute(self, question: Callable[[Outputs, Batch], Answer], batch: Mapping[str, np.ndarray]) -> Answer:
        """Returns `question(outputs, batch)`, where `outputs` are the model outputs for the batch.

        The model and `question` are jitted together, so that only the result of `question` is stored in device memory.

        Args:
          question: a module-level function of outputs and batch. It is compiled once per set of array shapes.
          batch: arrays in the format of data/batch.py.
        """
        return self.run(_with_outputs(question), batch)

    def run(self, work: Callable[[AnyModel, PyTree, Batch], Answer], batch: Mapping[str, np.ndarray]) -> Answer:
        """Returns `work(model, params, batch)`, jitted as in `compute`; for results that are not in the outputs."""
        with jax.set_mesh(self.mesh):
            return self._compiled(work)(self.params, self._put(with_token_inputs(batch, self._token_inputs)))

    def keep(self, make: Callable[["LoadedModel"], Answer]) -> Answer:
        """Returns `make(self)`, such as parameters in another layout; computed once per model and then cached."""
        return cast(Answer, self._cache(make))

    @functools.cached_property
    def _cache(self) -> Callable[[Callable[["LoadedModel"], object]], object]:
        return functools.cache(lambda make: make(self))

    def cached_across_checkpoints(self, make: Callable[["LoadedModel"], Answer]) -> Answer:
        """Returns `make(model)` from a cache that is shared by all checkpoints of a run.

        `make` gets this model with `params=None`. It returns compiled functions that take the parameters as an
        argument.
        """
        return cast(Answer, self._shared_cache(make))

    @functools.cached_property
    def _shared_cache(self) -> Callable[[Callable[["LoadedModel"], object]], object]:
        bare = dataclasses.replace(self, params=None)
        return functools.cache(lambda make: make(bare))

    def forget(self) -> None:
        """Clears the cache of `keep`. After text generation, this cache holds a copy of the parameters."""
        self.__dict__.pop("_cache", None)

    def share_compiled(self, other: Self) -> Self:
        """Returns this model, which now uses the compiled functions of `other`, another checkpoint of the same run."""
        self.__dict__["_compiled"], self.__dict__["_shared_cache"] = other._compiled, other._shared_cache
        return self

    def check_plain(self, purpose: str) -> None:
        """Raises UserError if the model has a parameter-efficient tuning that cannot be merged into a plain model.

        Args:
          purpose: operation that needs a plain model, for the message: "write text".
        """
        if isinstance(self.model, Adapted):
            raise UserError(
                f"{self.origin} is a model with {self.model.tuning}, which supports evaluate, score and predict; it "
                f"cannot {purpose}: for that, tune it by LoRA"
            )

    def _put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns the batch on the devices: rows are sharded, or replicated if the mesh does not divide them."""
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
def _with_outputs(question: Callable[[Outputs, Batch], Answer]) -> Callable[[AnyModel, PyTree, Batch], Answer]:
    return lambda model, params, batch: question(model.apply({"params": params}, batch, deterministic=True), batch)


def _outputs(outputs: Outputs, batch: Batch) -> Outputs:
    return outputs


def _with_hidden(model: AnyModel, params: PyTree, batch: Batch) -> Outputs:
    module = cast(nn.Module, model)  # not `Electra`, which consists of two encoders
    outputs, state = module.apply({"params": params}, batch, deterministic=True, mutable=["intermediates"])
    return outputs.replace(hidden=hidden_states(state["intermediates"]))


def check_language_model(loaded: LoadedModel) -> None:
    """Raises UserError if the model has a task head instead of a language-model head."""
    if (head := loaded.experiment.model.head) is not None:
        raise UserError(
            f"{loaded.origin} has the task head {head} and no language-model head: it cannot generate, fill in or "
            "score text; evaluate it with python -m pretrainax.evaluate --from=DIR"
        )
