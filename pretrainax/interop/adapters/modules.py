"""Maps the modules and tensors of a transformers model to the parameters of the PretrainAX model.

transformers fuses some matrices that are separate in PretrainAX (query, key and value in GPT-2).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from pretrainax import models
from pretrainax.adapt.matrices import Matrix, matrices_of
from pretrainax.config import Embed, MeshConfig, ModelConfig, UserError
from pretrainax.files.json_files import JsonObject
from pretrainax.interop.adapters.fields import WEIGHTS
from pretrainax.interop.origin import Origin
from pretrainax.interop.start import load_start, placed_start, zeros_of
from pretrainax.interop.weights import open_start
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import flat
from pretrainax.zoo.convert import Rows, as_ours, rows_of, tensor_locations, their_shape
from pretrainax.zoo.family import FusedPart, HuggingFace, NameRow

State: TypeAlias = Mapping[str, np.ndarray]
Adapter: TypeAlias = tuple[JsonObject, dict[str, np.ndarray]]  # contents of adapter_config.json, tensors by name
# (path of a parameter of the base model, layer or None) -> the parameter, or its part in this layer.
ReadBase: TypeAlias = Callable[[str, int | None], np.ndarray]
_PREFIX = "base_model.model."  # prefix of the names of all tensors, except the tensors of virtual tokens
_TUNED = re.compile(r"(?P<module>.+)\.(?P<kind>lora_[A-Za-z_]+|ia3_l)(\.(?P<part>weight|bias))?")


class MatrixLocation(NamedTuple):
    """One layer of a PretrainAX matrix, and its location within a linear module in transformers."""

    path: str  # path of the PretrainAX matrix
    layer: int
    part: FusedPart  # outputs of the module that belong to the matrix


@dataclasses.dataclass(frozen=True)
class TheirModel:
    """The model in transformers that an adapter changes."""

    family: HuggingFace
    model: ModelConfig

    @functools.cached_property
    def rows(self) -> Rows:
        """Returns the tensor names of the parameters, by parameter path; omits parameters that transformers lacks."""
        table = self.family.names(self.model)
        if isinstance(self.model.head, Embed):  # transformers' class has no heads
            prefix = _base_prefix(table)
            table = [row._replace(name=row.name.removeprefix(prefix)) for row in table]
        named, shapes = {row.path for row in table}, flat(models.abstract_params(self.model))
        return rows_of(table, {path: x for path, x in shapes.items() if path in named})

    @functools.cached_property
    def matrices(self) -> dict[str, Matrix]:
        return {matrix.path: matrix for matrix in matrices_of(models.abstract_params(self.model))}

    @functools.cached_property
    def modules(self) -> dict[str, list[MatrixLocation]]:
        """Returns the PretrainAX matrices in each linear module that can be tuned, by the name of the module."""
        modules = {}
        for path in self.matrices:
            row, shape = self.rows[f"{path}/kernel"]
            assert isinstance(row.part, FusedPart)  # only experts have interleaved outputs, and experts are not tuned
            for name, index in tensor_locations(row, shape):
                location = MatrixLocation(path, index[0] if index else 0, row.part)
                modules.setdefault(name.removesuffix(".weight"), []).append(location)
        return modules

    @functools.cached_property
    def tensors(self) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
        """Returns the parameters in each tensor, as (path, index), by the name of the tensor."""
        tensors = {}
        for path, (row, shape) in self.rows.items():
            for name, index in tensor_locations(row, shape):
                tensors.setdefault(name, []).append((path, index))
        return tensors

    @functools.cached_property
    def head_paths(self) -> list[str]:
        """Returns the paths of the parameters of the task head; [] if there is no task head."""
        heads = head_modules(self.model) if self.model.head is not None else ()
        return [path for path in flat(models.abstract_params(self.model)) if path.partition("/")[0] in heads]

    def is_linear(self, module: str) -> bool:
        """Returns True for a torch.nn.Linear, whose weight is [out, in]; False for Conv1D of GPT-2, [in, out]."""
        return self.rows[f"{self.modules[module][0].path}/kernel"][0].transposed

    def find(self, name: str, known: Container[str]) -> str | None:
        """Returns the name in `known` of a module or tensor of an adapter, or None.

        If the adapter was trained with the class without heads, its names lack a prefix, for example "bert.".
        """
        return next((x for x in (name, _base_prefix(self.family.names(self.model)) + name) if x in known), None)

    def flat_matrix(self, path: str, kernel: np.ndarray) -> np.ndarray:
        """Reshapes the kernel of one layer to [in, out]."""
        return kernel.reshape(math.prod(self.matrices[path].inputs), -1)

    def weight(self, module: str, read: ReadBase) -> np.ndarray:
        """Reads the weight [out, in] of a linear module from the base model."""
        parts = [
            (location.part, self.flat_matrix(location.path, read(f"{location.path}/kernel", location.layer)))
            for location in self.modules[module]
        ]
        weight = np.zeros((parts[0][0].fused_size(parts[0][1].shape[1]), len(parts[0][1])), np.float32)
        for part, matrix in parts:
            weight[part.our_slice(len(weight))] = matrix.T
        return weight

    def to_theirs(self, params: State) -> dict[str, np.ndarray]:
        """Converts whole parameters to tensors by name.

        Raises:
          UserError: a tensor contains more than these parameters.
        """
        tensors: dict[str, np.ndarray] = {}
        for path, x in params.items():
            if path not in self.rows:
                raise UserError(f"the run has trained {path}, which {self.family.model_type} of transformers lacks")
            row, shape = self.rows[path]
            for name, index in tensor_locations(row, shape):
                if lacking := [other for other, _ in self.tensors[name] if other not in params]:
                    raise UserError(f"the run has trained {path}, but not {', '.join(lacking)} of the same {name}")
                theirs = tensors.setdefault(name, np.zeros(their_shape(row, x[index].shape), np.float32))
                as_ours(row, theirs, x[index].shape)[...] = x[index]
        return tensors


def _base_prefix(table: Sequence[NameRow]) -> str:
    """Returns the prefix of tensor names that the class without heads omits, for example "bert."; "" for T5."""
    name = next(row.name for row in table if row.path == "token_embedding/embedding")
    return name.partition(".")[0] + "." if name.count(".") > 1 else ""


class AdapterTensors(NamedTuple):
    """The tensors of an adapter with low-rank updates or rescaling vectors."""

    updates: dict[str, dict[str, np.ndarray]]  # module of the model -> kind ("lora_A", …) -> tensor
    names: dict[str, str]  # module of the model -> its name in the adapter
    whole: dict[str, np.ndarray]  # whole tensors of the model, by name


def split_tensors(tensors: State, their: TheirModel) -> AdapterTensors:
    """Assigns the tensors of an adapter to the modules and tensors of the model.

    Raises:
      UserError: the model lacks a module or tensor of the adapter, or the adapter is empty.
    """
    split, problems = AdapterTensors({}, {}, {}), []
    tied = their.family.tied(their.model)
    for full_name, x in tensors.items():
        name = full_name.removeprefix(_PREFIX)
        if ".original_module." in name:  # with bias="all", PEFT also saves the modules that modules_to_save replaces
            continue
        match = _TUNED.fullmatch(name)
        if match is None:
            name = re.sub(r"\.(base_layer|modules_to_save)(?=\.)", "", name)
            if (found := their.find(name, their.tensors.keys() | tied.keys())) is not None:
                split.whole[found] = x
                continue
        elif (module := their.find(match["module"], their.modules)) and match["part"] != "bias":
            split.updates.setdefault(module, {})[match["kind"]] = x
            split.names[module] = match["module"]
            continue
        problems.append(full_name)
    if problems or not split.updates:
        raise UserError(
            f"{WEIGHTS} does not hold updates of this model: {', '.join(problems) or 'it has none of linear layers'}"
        )
    return split


def tensor_name(module: str, kind: str) -> str:
    """Returns the name of a tensor in the files of an adapter."""
    return f"{_PREFIX}{module}.{kind}"


def base_reader(origin: Origin, model: ModelConfig) -> ReadBase:
    """Returns the function that reads the parameters of the base model, as float32.

    Args:
      origin: location of the base model.
      model: config of the model, which may have heads that the base model lacks. Reading such a head raises UserError.
    """

    @functools.cache
    def source() -> tuple[Callable[[str, int | None], np.ndarray], Container[str]]:
        if not origin.steps:
            weights = open_start(origin.directory, model, fresh_heads=True)
            shapes = flat(weights.abstract)

            def read_tensor(path: str, layer: int | None) -> np.ndarray:
                every, *axes = (slice(None),) * len(shapes[path].shape)
                if layer is None:
                    return weights.read(path, (every, *axes))
                return weights.read(path, (slice(layer, layer + 1), *axes))[0]

            return read_tensor, weights.missing_head_paths
        abstract = placed_start(models.abstract_params(model), make_mesh(MeshConfig()))
        missing: list[str] = []

        def fresh(paths):
            missing.extend(paths)
            return zeros_of(abstract)(paths)

        params = flat(load_start(origin, model, abstract, fresh))
        return lambda path, layer: np.asarray(params[path] if layer is None else params[path][layer]), missing

    def read(path: str, layer: int | None) -> np.ndarray:
        read_source, missing = source()
        if path in missing:
            raise UserError(
                f"neither {WEIGHTS} nor {origin.description} holds {path}, so the results of the adapter depend on "
                "random numbers: train it again with this module in modules_to_save"
            )
        return read_source(path, layer)

    return read
