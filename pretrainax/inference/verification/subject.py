"""Locates the two sides of a comparison: a Hugging Face directory, and the same model as PretrainAX loads it."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import NamedTuple, Optional

import jax
import numpy as np

from pretrainax import models
from pretrainax.config import Embed, Experiment, ModelConfig, UserError
from pretrainax.inference.framing import framed_prompt
from pretrainax.inference.language_model import LanguageModel
from pretrainax.inference.load import default_mesh, load_origin
from pretrainax.interop.adapters import import_adapter, is_adapter
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.directories import evaluation_of
from pretrainax.interop.elmo_files import is_elmo
from pretrainax.interop.generation import end_tokens
from pretrainax.interop.origin import Origin, find_origin
from pretrainax.interop.start import experiment_of, load_recorded_start
from pretrainax.interop.weights import DirectoryWeights, verify_files
from pretrainax.layers.compute import Compute
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.device_memory import check_parameters_fit
from pretrainax.sharding.param_paths import parameter_names
from pretrainax.sharding.rules import tree_shardings, with_shardings
from pretrainax.storage.places import complete, local_path
from pretrainax.tokenization.base import Tokenizer, load_tokenizer
from pretrainax.tokenization.huggingface import read_tokenizer
from pretrainax.zoo.family import HuggingFace, without_heads


class Subject(NamedTuple):
    """A Hugging Face directory, and the model that PretrainAX loads from it or from a run."""

    directory: str  # Hugging Face directory that transformers loads; for an adapter, the directory of the base model
    adapter: Optional[str]  # PEFT directory, or None
    origin: Origin  # location of the model that PretrainAX loads
    experiment: Experiment
    tokenizer: Tokenizer
    is_bare: bool  # True: the directory has no head, and its final hidden states are compared

    @property
    def model(self) -> ModelConfig:
        return self.experiment.model

    @property
    def family(self) -> HuggingFace:
        return described_model(read_config_json(self.directory))[0]

    @property
    def architecture(self) -> str:
        """Returns the name of the transformers class that computes the model."""
        names = read_config_json(self.directory).get("architectures")
        if self.adapter is None and names and isinstance(names, list):
            return str(names[0])
        return self.family.class_of(self.model)

    @property
    def generates(self) -> bool:
        """Returns True if the model generates text."""
        return self.model.family != "encoder" and self.model.head is None

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Returns the ids that end a generated text in PretrainAX."""
        ends, separator = end_tokens(self.origin.directory, self.model.vocab_size), self.tokenizer.vocabulary.separator
        return ends if ends is not None else () if separator is None else (separator,)

    @property
    def decoder_start(self) -> int:
        """Returns the first decoder token of an encoder-decoder in PretrainAX."""
        return int(framed_prompt(np.zeros(0, np.int32), self.experiment, self.tokenizer)["tokens"][0])

    @property
    def max_length(self) -> Optional[int]:
        """Returns the maximum input length in tokens, without virtual tokens; None means no limit."""
        tuning = self.experiment.tuning
        return (
            self.model.position.max_length if tuning is None else min(tuning.limits(self.model).values(), default=None)
        )

    def num_params(self) -> int:
        """Counts the parameters of the model."""
        return sum(x.size for x in jax.tree.leaves(models.abstract_params(self.model)))

    def load(self) -> LanguageModel:
        """Loads the model in PretrainAX, with activations in float32."""
        return self._load_bare() if self.is_bare else load_origin(self.origin, "float32")

    def _load_bare(self) -> LanguageModel:
        """Loads a directory whose model has no head, for example a BertModel."""
        verify_files(self.directory)
        source = DirectoryWeights(self.directory, fresh_heads=True)
        source.bind(self.model)
        source.verify()
        mesh = default_mesh(source.abstract, jax.devices())
        abstract = with_shardings(source.abstract, tree_shardings(mesh, source.abstract))
        check_parameters_fit(abstract, self.origin.description)
        built = models.build(self.model, Compute(dtype="float32"))
        return LanguageModel(
            self.experiment, built, source.params(abstract), self.tokenizer, mesh, self.origin.description
        )


@contextmanager
def open_subject(directory: str, model: Optional[str], base: Optional[str]) -> Iterator[Subject]:
    """Finds both sides of a comparison; the arguments are the same as in `verify`.

    Raises:
      UserError: the directory is not a Hugging Face directory, or PretrainAX does not support its model.
    """
    folder = local_path(os.path.expanduser(directory))
    if is_elmo(folder):
        raise UserError(f"{directory} holds ELMo's released files, for which transformers has no class")
    if is_adapter(folder):
        with TemporaryDirectory(prefix="verify-") as workdir:
            if model is None:
                model = os.path.join(workdir, "run")
                import_adapter(folder, base, model)
            origin = find_origin(model)
            yield _run_subject(_base_directory(origin, base), folder, origin)
        return
    if base is not None:
        raise UserError(f"--base={base} is for adapters, and {directory} is not an adapter: leave it out")
    origin = find_origin(directory)
    if origin.steps:
        raise UserError(f"{directory} is a run: give the Hugging Face directory of an export as --from=DIR")
    complete(folder)
    yield _directory_subject(folder, origin) if model is None else _run_subject(folder, None, find_origin(model))


def _base_directory(run: Origin, base: Optional[str]) -> str:
    """Returns the Hugging Face directory of an adapter's base model: `base`, or the model that `run` started from."""
    origin = load_recorded_start(run.directory) if base is None else find_origin(base)
    if origin.steps:
        raise UserError(
            f"the base model {origin.description} is a run, which transformers cannot load: export it, and give the "
            "export as --base=DIR"
        )
    complete(origin.directory)
    return origin.directory


def _run_subject(directory: str, adapter: Optional[str], origin: Origin) -> Subject:
    experiment = experiment_of(origin)
    experiment.tokenizer.path = os.path.join(os.path.abspath(origin.directory), "tokenizer")
    tokenizer = load_tokenizer(experiment.tokenizer.path)
    return Subject(directory, adapter, origin, experiment, tokenizer, False)


def _directory_subject(directory: str, origin: Origin) -> Subject:
    source, tokenizer = DirectoryWeights(directory, fresh_heads=True), read_tokenizer(directory)
    config, heads = source.config, head_modules(source.config)
    head_paths = [path for path in parameter_names(source.abstract) if path.partition("/")[0] in heads]
    lacks_heads = bool(head_paths) and {*head_paths} <= {*source.missing_head_paths}
    own_class = described_model(read_config_json(directory))[0].class_of(config)  # GPT2LMHeadModel, MarianMTModel
    is_bare = lacks_heads or (source.architecture.endswith("Model") and source.architecture != own_class)
    config = without_heads(config) if is_bare else config
    experiment = evaluation_of(config, tokenizer.vocabulary, os.path.abspath(directory), source.labels)
    if is_bare:
        experiment.model = dataclasses.replace(config, head=Embed(1))
    return Subject(directory, None, origin, experiment, tokenizer, is_bare)
