"""A model that is ready to be asked: its config, parameters and tokenizer, on a mesh."""

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
    """Holds what every use of a model needs. `load` makes it of a directory, and a run of what it has trained."""

    experiment: Experiment  # the run's, or what an import says; its `model` has numbers where a config had "auto"
    model: AnyModel  # of a run of ELECTRA its two encoders; `load` parts them
    params: PyTree  # float32, in their shards
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    origin: str  # where from, for people: "runs/mine, step 2,000"

    def __repr__(self) -> str:
        """Returns one line for people: where the model is from, and what it is."""
        model, devices = self.experiment.model, f"{self.mesh.size} × {self.mesh.devices.flat[0].device_kind}"
        numbers = sum(x.size for x in jax.tree.leaves(self.params))
        shape = f"{model.family}, {large_number(numbers)} parameters, {model.vocab_size:,} ids"
        return f"{type(self).__name__}({self.origin}: {shape}, {devices})"

    def __call__(self, batch: Mapping[str, np.ndarray], hidden: bool = False) -> Outputs:
        """Returns what the heads say of a batch as data/batch.py describes it, without dropout.

        Compiled once for each set of shapes. `.logits` are [B, N, V] float32; `.hidden` is the stream after each block
        of each stack, [L, B, T, D], where `hidden` asks for it, and of a model that is one encoder, decoder, or pair.
        """
        if hidden:
            self.check_plain("give hidden states")
        return self.run(_with_hidden, batch) if hidden else self.ask(_everything, batch)

    def ask(self, question: Callable[[Outputs, Batch], Answer], batch: Mapping[str, np.ndarray]) -> Answer:
        """Returns what a function makes of the outputs for a batch, and of the batch: arrays that are all that is kept.

        question: a function at the top of a file, compiled with the model once for each set of shapes.
        """
        return self.run(_asking(question), batch)

    def run(self, work: Callable[[AnyModel, PyTree, Batch], Answer], batch: Mapping[str, np.ndarray]) -> Answer:
        """Returns `work(model, params, batch)`, for what is not among the outputs; compiled as `ask` is."""
        with jax.set_mesh(self.mesh):
            return self._compiled(work)(self.params, self._put(with_token_inputs(batch, self._token_inputs)))

    def keep(self, make: Callable[["LoadedModel"], Answer]) -> Answer:
        """Returns `make(self)`, which is made once: what a use of the model needs again, such as what it compiled."""
        return cast(Answer, self._kept(make))

    @functools.cached_property
    def _kept(self) -> Callable[[Callable[["LoadedModel"], object]], object]:
        return functools.cache(lambda make: make(self))

    def keep_compiled(self, make: Callable[["LoadedModel"], Answer]) -> Answer:
        """Returns `make` of this model without its parameters, made once for all checkpoints of a run: functions that
        take parameters, and are compiled."""
        return cast(Answer, self._made(make))

    @functools.cached_property
    def _made(self) -> Callable[[Callable[["LoadedModel"], object]], object]:
        bare = dataclasses.replace(self, params=None)
        return functools.cache(lambda make: make(bare))

    def forget(self) -> None:
        """Lets go of what `keep` has made, which is as large as the parameters where a model has written."""
        self.__dict__.pop("_kept", None)

    def compiled_as(self, other: Self) -> Self:
        """Returns this model, that of another checkpoint of one run, after it has taken what `other` has compiled."""
        self.__dict__["_compiled"], self.__dict__["_made"] = other._compiled, other._made
        return self

    def check_plain(self, purpose: str) -> None:
        """Raises UserError where a tuning stands beside the model, as its parameters are none of a plain one."""
        if isinstance(self.model, Adapted):
            raise UserError(
                f"{self.origin} is a model with {self.model.tuning}, which can be evaluated, scored and asked by "
                f"predict; it cannot {purpose}: for that, tune it by LoRA"
            )

    def _put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Spreads the rows over the mesh; a number of rows that it does not divide is whole on each device."""
        if len(next(iter(batch.values()))) % axis_size(BATCH_AXES):
            return jax.device_put(dict(batch), NamedSharding(self.mesh, PartitionSpec()))
        return put_batch(batch, self.mesh)

    @functools.cached_property
    def _token_inputs(self) -> dict[str, np.ndarray]:
        return token_inputs(self.experiment.model, self.tokenizer)

    @functools.cached_property
    def _compiled(self) -> Callable[[Callable[..., PyTree]], Callable[..., PyTree]]:
        model = self.model  # and not `self`, whose parameters `compiled_as` would keep in memory
        return functools.cache(lambda work: jax.jit(functools.partial(work, model)))


@functools.cache
def _asking(question: Callable[[Outputs, Batch], Answer]) -> Callable[[AnyModel, PyTree, Batch], Answer]:
    return lambda model, params, batch: question(model.apply({"params": params}, batch, deterministic=True), batch)


def _everything(outputs: Outputs, batch: Batch) -> Outputs:
    return outputs


def _with_hidden(model: AnyModel, params: PyTree, batch: Batch) -> Outputs:
    stacks = cast(nn.Module, model)  # and no `Electra`, whose two encoders each have their own
    outputs, kept = stacks.apply({"params": params}, batch, deterministic=True, mutable=["intermediates"])
    return outputs.replace(hidden=hidden_states(kept["intermediates"]))


def check_language_model(loaded: LoadedModel) -> None:
    """Raises UserError where a model has the head of a task in the place of that over the vocabulary."""
    if (head := loaded.experiment.model.head) is not None:
        raise UserError(
            f"{loaded.origin} has the head {head} of a task, and says nothing of tokens: it neither writes nor fills "
            "in nor scores text; its own validation is python -m pretrainax.evaluate --from=DIR"
        )
