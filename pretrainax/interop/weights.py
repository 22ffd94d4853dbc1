"""The weights of a local Hugging Face directory, read by the paths of our parameters."""

import os
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax import models
from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.params import Index
from pretrainax.config import ModelConfig, UserError
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.safetensors_files import Reader
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.zoo.convert import check_shapes, places, rows_of, view
from pretrainax.zoo.family import Row, differences


def load_params(directory: str, model: ModelConfig, abstract_params: PyTree) -> PyTree:
    """Reads the parameters of a Hugging Face directory, each device reading its own shards.

    Args:
      model: of the run; what `directory` computes must be the same, but for a pair head that the run does without.
      abstract_params: jax.ShapeDtypeStructs with shardings.

    Raises:
      UserError: another architecture, with the fields; or weights that are not whole.
    """
    source = DirectoryWeights(directory)
    different = [name for name in differences(source.config, model) if name != "pair_head" or model.pair_head]
    if different:
        fields = (
            f"config.model.{name} is {getattr(model, name)!r}, there {getattr(source.config, name)!r}"
            for name in different
        )
        raise UserError(f"config.checkpoint.init_from={directory} holds another architecture: {'; '.join(fields)}")
    source.bind(model)
    leaves = [
        jax.make_array_from_callback(x.shape, x.sharding, lambda index, path=path: source.read(path, index))
        for path, x in zip(parameter_names(abstract_params), jax.tree.leaves(abstract_params), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract_params), leaves)


class DirectoryWeights:
    """The weights of a directory, by the paths of our parameters.

    `config` is the model that its config.json describes, `abstract` the shapes of the parameters that are bound.
    """

    def __init__(self, directory: str):
        """Opens the files and binds the parameters of `config`; UserError for whatever is not as it must be."""
        self.directory = directory
        config_json = read_config_json(directory)
        self._family, self.config = described_model(config_json)
        if config_json.get("quantization_config"):
            raise UserError(f"{directory} is quantized (quantization_config of config.json), which is not read")
        listed = os.path.join(directory, manifest.MANIFEST)
        faults = [x for x in manifest.faults(directory) if "not in" not in x] if os.path.exists(listed) else []
        if faults:
            raise UserError(f"{directory} is not what its {manifest.MANIFEST} says: {', '.join(faults)}")
        self._tensors = Reader(directory)
        self.bind(self.config)

    def bind(self, config: ModelConfig) -> None:
        """Finds each parameter of `config` among the tensors; UserError names all that are missing or unknown."""
        self.abstract = models.abstract_params(config)
        try:
            self._rows = rows_of(self._family.names(config), self.abstract)
        except ValueError as e:
            raise UserError(f"{self.directory}: no {self._family.model_type} is as its config.json says: {e}") from e
        tied, zeros = self._family.tied(config), self._family.zeros(config)
        needed = {name for row, shape in self._rows.values() for name, _ in places(row, shape)}
        self._theirs = _by_canonical_name(self._tensors.shapes, needed | tied.keys() | zeros.keys())
        for copy, original in tied.items():  # a file may hold either
            if copy in self._theirs:
                self._theirs.setdefault(original, self._theirs[copy])
        ignored = re.compile("|".join((*self._family.ignored, "(?!)")))
        own = rows_of(self._family.names(self.config), models.abstract_params(self.config)).values()
        known = needed | tied.keys() | zeros.keys() | {name for row, shape in own for name, _ in places(row, shape)}
        unknown = [name for name in self._theirs if name not in known and not ignored.fullmatch(name)]
        check_shapes(self._rows, {name: self._tensors.shapes[x] for name, x in self._theirs.items()}, unknown)
        coded = [f"{name} is {self.dtypes[name]}" for name in sorted(needed) if not self._is_float(name)]
        if coded:
            raise UserError(f"{self.directory} is quantized, which is not read: {', '.join(coded)}")
        for copy, original in tied.items():
            if copy in self._theirs and not np.array_equal(self._tensor(copy), self._tensor(original)):
                raise UserError(f"{self.directory}: {copy} differs from {original}, to which config.json ties it")
        for name in zeros:
            if name in self._theirs and self._tensor(name).any():
                raise UserError(f"{self.directory}: {name} is not zero, and no part of this architecture here")

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each tensor, by its canonical name."""
        return {name: self._tensors.dtypes[theirs].name for name, theirs in self._theirs.items()}

    def _is_float(self, name: str) -> bool:
        return jnp.issubdtype(self._tensors.dtypes[self._theirs[name]], jnp.floating)

    def _tensor(self, name: str) -> np.ndarray:
        return self._tensors[self._theirs[name]]

    def read(self, path: str, index: Index) -> np.ndarray:
        """Reads the block of a parameter at `index`, as float32; UserError for numbers that are not finite."""
        row, shape = self._rows[path]
        if "{layer}" in row.name:
            layers = list(places(row, shape))[index[0]]
            return np.stack([self._block(row, name, shape[1:], index[1:]) for name, _ in layers])
        return self._block(row, row.name, shape, index)

    def _block(self, row: Row, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        block = np.ascontiguousarray(view(row, self._tensor(name), shape)[index], np.float32)
        if not np.isfinite(block).all():
            # all of them are looked through only now that one is known
            named = [x for x in self._theirs if self._is_float(x) and not np.isfinite(self._tensor(x)).all()]
            verb = "holds" if len(named) == 1 else "hold"
            raise UserError(f"{self.directory}: {', '.join(named)} {verb} numbers that are not finite: a damaged file")
        return block


def _by_canonical_name(found: Iterable[str], known: set[str]) -> dict[str, str]:
    """Returns {the name that a table has: the name in the file}.

    Files of a bare base model leave out the first part of their names ("bert."), and the oldest call the two vectors of
    a norm gamma and beta.
    """
    prefixes = {name.partition(".")[0] + "." for name in known}
    names = {}
    for theirs in found:
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", theirs))
        if name not in known:
            name = next((prefix + name for prefix in sorted(prefixes) if prefix + name in known), name)
        names[name] = theirs
    return names
