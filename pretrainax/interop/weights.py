"""Reads the weights of a Hugging Face directory by the parameter paths of this project."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax import models
from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.params import Index, Initializer
from pretrainax.config import ModelConfig, UserError
from pretrainax.interop.adaptations import suggested
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.safetensors_files import INDEX, SINGLE, Reader
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.param_paths import PyTree, flat, parameter_names
from pretrainax.storage.places import complete
from pretrainax.zoo.convert import Rows, as_ours, rows_of, shape_problems, stacked_axes, tensor_locations
from pretrainax.zoo.family import ConfigJson, NameRow, differences

_MOST_FIELDS = 6  # maximum number of differing fields in an error message


def load_params(
    directory: str, model: ModelConfig, abstract_params: PyTree, fresh: Optional[Initializer] = None
) -> PyTree:
    """Returns the parameters of a Hugging Face directory; each device reads its own shards.

    Args:
      model: config of the model that is initialized from the directory.
      abstract_params: jax.ShapeDtypeStructs with shardings.
      fresh: initializes heads that the directory lacks; None: the directory must have all heads.

    Raises:
      UserError: for the same reasons as in `open_start`, or because the files are incomplete or damaged.
    """
    verify_files(directory)
    source = open_start(directory, model, fresh is not None)
    source.verify()
    return source.params(abstract_params, fresh(source.lacking) if fresh is not None else {})


def open_start(directory: str, model: ModelConfig, fresh_heads: bool) -> "DirectoryWeights":
    """Opens a Hugging Face directory to initialize a run; checks names and shapes without reading weights.

    Args:
      model: model config of the run. The model in `directory` must have the same config, except for heads that the run
        does not use.
      fresh_heads: True allows the heads to differ. The attribute `lacking` of the result then lists the parameters that
        the directory lacks.

    Raises:
      UserError: the architecture differs, with a list of the fields, or the tensors do not match the model.
    """
    source = DirectoryWeights(directory, fresh_heads)
    given = f"config.checkpoint.init_from={directory} holds"
    theirs = source.config.stacks["encoder"] if takes_encoder(source.config, model) else source.config
    names = [
        name for name in differences(theirs, model) if not (is_head(name) and (fresh_heads or not getattr(model, name)))
    ]
    if theirs.family != model.family:
        raise UserError(
            f"{given} {source.architecture}, of family {source.config.family!r}, and config.model.family is "
            f"{model.family!r}: set a --config of the first family, or a directory of the second"
            f"{_adaptable(source.config, model, names)}"
        )
    if names:
        raise other_architecture(directory, theirs, model, names)
    source.bind(model)
    return source


def takes_encoder(theirs: ModelConfig, ours: ModelConfig) -> bool:
    """Returns True if `ours` is an encoder and `theirs` an encoder-decoder, whose encoder initializes it.

    An example in transformers is T5ForTokenClassification.
    """
    return (theirs.family, ours.family) == ("encoder_decoder", "encoder")


def other_architecture(
    directory: str, theirs: ModelConfig, ours: ModelConfig, names: Sequence[str], paths: Sequence[str] = ()
) -> UserError:
    """Returns the error for a run that cannot be initialized from a model because the architectures differ.

    Args:
      directory: location of the model.
      theirs: config of the model in `directory`.
      ours: model config of the run.
      names: fields of the model config that differ.
      paths: parameters that do not match.
    """
    fields = [f"config.model.{x} is {getattr(ours, x)!r}, there {getattr(theirs, x)!r}" for x in names]
    more = [f"and {len(fields) - _MOST_FIELDS} other fields"] if len(fields) > _MOST_FIELDS else []
    of_heads = {path.partition("/")[0] for path in paths} <= head_modules(theirs) | head_modules(ours)
    only_heads = of_heads if paths else all(map(is_head, names))
    heads = "; config.checkpoint.fresh_heads=True initializes heads" if only_heads else ""
    lost = f" ({', '.join(paths)} are missing, unused, or of another shape)" if paths else ""
    text = "; ".join(fields[:_MOST_FIELDS] + more)
    return UserError(
        f"config.checkpoint.init_from={directory} holds another architecture{': ' if text else ''}{text}{lost}{heads}"
        f"{_adaptable(theirs, ours, names)}"
    )


def _adaptable(theirs: ModelConfig, ours: ModelConfig, names: Sequence[str]) -> str:
    """Returns a hint about adaptations that convert `theirs` to `ours`, for messages; "" if there are none.

    Args:
      names: fields of the model config that differ.
    """
    kinds = ", ".join(map(str, suggested(theirs, ours, names)))
    return f'; config.checkpoint.adapt="{kinds}" converts the start' if kinds else ""


def verify_files(directory: str) -> None:
    """Verifies the checksums in the manifest of a directory, if it has one; raises UserError for changed files."""
    complete(directory)
    manifest_path = os.path.join(directory, manifest.MANIFEST)
    faults = [x for x in manifest.faults(directory) if "not in" not in x] if os.path.exists(manifest_path) else []
    if faults:
        raise UserError(f"{directory} does not match its {manifest.MANIFEST}: {', '.join(faults)}")


def is_head(field: str) -> bool:
    """Returns True if a field of ModelConfig configures a head."""
    return field.endswith("_head") or field in ("head", "replaced_token_context", "enhanced_mask_decoder")


def label_names(config_json: ConfigJson) -> tuple[str, ...]:
    """Returns the label names in a config.json in the order of their ids; () if it has no valid label names."""
    names = config_json.get("id2label")
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        return ()
    return tuple(str(names[str(i)]) for i in range(len(names)))


class DirectoryWeights:
    """The weights in a Hugging Face directory, by the parameter paths of a model config.

    The model config is at first `config`. The method `bind` changes it.

    Attributes:
      config: the model config that config.json describes.
      labels: label names of a classifier; () for other models.
      abstract: shapes of the parameters.
      lacking: paths of the head parameters that the directory lacks.
    """

    def __init__(self, directory: str, fresh_heads: bool = False):
        """Opens the files and matches them to the model in config.json; raises UserError for invalid directories.

        Args:
          fresh_heads: True allows heads to be missing.
        """
        self.directory, self._fresh_heads = directory, fresh_heads
        config_json = read_config_json(directory)
        self._family, self.config = described_model(config_json)
        named = config_json.get("architectures")
        self.architecture = str(named[0]) if named and isinstance(named, list) else self._family.class_of(self.config)
        self.labels = label_names(config_json)
        if config_json.get("quantization_config"):
            raise UserError(f"{directory} is quantized (quantization_config of config.json), which is not supported")
        self._tensors = Reader(directory)
        self.bind(self.config)

    def bind(self, config: ModelConfig) -> None:
        """Matches the parameters of a model config to tensors.

        Raises:
          UserError: tensors are missing, unknown, quantized or of the wrong shape; the message lists them.
        """
        self.abstract, table = models.abstract_params(config), self._family.names(config)
        shapes, covered, heads = flat(self.abstract), {row.path for row in table}, head_modules(config)
        # Heads, or parts of heads, that no transformers class of the family has. They are initialized.
        unnamed = [path for path in shapes if path not in covered and path.partition("/")[0] in heads]
        self._drawn = unnamed if self._fresh_heads else []
        try:
            self._rows = rows_of(table, {path: x for path, x in shapes.items() if path not in self._drawn})
        except ValueError as e:
            raise UserError(f"{self.directory}: no {self._family.model_type} fits its config.json: {e}") from e
        self._tied, self._zeros = self._family.tied(config), self._family.zeros(config)
        stored_rows = rows_of(self._family.names(self.config), models.abstract_params(self.config))
        required = _names(self._rows) | self._tied.keys() | self._zeros.keys()
        ignored = re.compile("|".join((*self._family.ignored, "(?!)")))
        base = self._rows["token_embedding/embedding"][0].name.partition(".")[0] + "."
        known = (required.__contains__, _names(stored_rows).__contains__, ignored.fullmatch)
        self._theirs = self._by_canonical_name(base, known)
        for copy, original in self._tied.items():  # a file may contain either of two tied tensors
            if copy in self._theirs:
                self._theirs.setdefault(original, self._theirs[copy])
        self._check(config, [name for name in self._theirs if not any(is_known(name) for is_known in known)])
        present = sorted(_names(self._rows) & self._theirs.keys())
        quantized = [f"{name} is {self.dtypes[name]}" for name in present if not self._is_float(name)]
        if quantized:
            raise UserError(f"{self.directory} is quantized, which is not supported: {', '.join(quantized)}")

    def _check(self, config: ModelConfig, unknown: list[str]) -> None:
        """Sets `lacking`; raises UserError for tensors that are missing, unknown or of the wrong shape.

        Args:
          unknown: names of tensors that no transformers class of the family has.
        """
        shapes = {name: self._tensors.shapes[theirs] for name, theirs in self._theirs.items()}
        heads = head_modules(config)
        maps: dict[str, Rows] = {}  # of heads, by module: a linear layer or norm is present or absent as a whole
        for path, row in self._rows.items():
            if path.partition("/")[0] in heads:
                maps.setdefault(path.rpartition("/")[0], {})[path] = row
        absent = {name: rows for name, rows in maps.items() if self._is_absent(rows, shapes)}
        self.lacking = [path for rows in absent.values() for path in rows] + self._drawn
        present = {path: row for path, row in self._rows.items() if path not in self.lacking}
        problems = shape_problems(present, shapes, unknown)
        if problems and not self._fresh_heads:
            problems = shape_problems(self._rows, shapes, unknown)
        if problems:
            raise UserError(f"{self.directory}: the weights do not match its config.json: {'; '.join(problems)}")
        if absent and not self._fresh_heads:
            lost = ", ".join(sorted(name for rows in absent.values() for name in _names(rows)))
            raise UserError(
                f"{self.directory} ({self.architecture}) is a model without {', '.join(absent)}: it lacks {lost}. To "
                f"pretrain from it with fresh heads: --config.checkpoint.init_from={self.directory} "
                '--config.checkpoint.fresh_heads=True; to add fresh heads with transformers: python -c "from '
                f"transformers import {self._family.class_of(config)} as M; M.from_pretrained('{self.directory}')"
                ".save_pretrained('with_heads')\", and copy its tokenizer files there"
            )

    def _is_absent(self, rows: Rows, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns True if a module of a head is missing, or must be initialized because it has different shapes.

        Args:
          rows: the parameters of the module.
          shapes: shape of each tensor in the directory.
        """
        names = _names(rows)
        has_other_shape = self._fresh_heads and names <= shapes.keys() and shape_problems(rows, shapes)
        return not names & shapes.keys() or bool(has_other_shape)

    def verify(self) -> None:
        """Raises UserError if the copies of a tied tensor differ, or if a tensor that must be zero is not zero."""
        for copy, original in self._tied.items():
            if copy in self._theirs and not np.array_equal(self._tensor(copy), self._tensor(original)):
                raise UserError(f"{self.directory}: {copy} differs from {original}, but config.json ties them")
        for name in self._zeros:
            if name in self._theirs and self._tensor(name).any():
                raise UserError(f"{self.directory}: {name} is not zero, but this model has no such parameter")

    def params(self, abstract_params: PyTree, drawn: Mapping[str, jax.Array] = MappingProxyType({})) -> PyTree:
        """Returns all parameters as sharded arrays; each device reads its own shards.

        Args:
          abstract_params: jax.ShapeDtypeStructs with shardings.
          drawn: initialized parameters by path, which are not read.
        """
        leaves = [
            drawn[path]
            if path in drawn
            else jax.make_array_from_callback(x.shape, x.sharding, lambda index, path=path: self.read(path, index))
            for path, x in zip(parameter_names(abstract_params), jax.tree.leaves(abstract_params), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract_params), leaves)

    def _by_canonical_name(self, base: str, known: Iterable[Callable[[str], object]]) -> dict[str, str]:
        """Returns {canonical name: name in the file}; raises UserError if the files contain a tensor under two names.

        Files of a base model without heads omit the first part of the names, such as "bert.". The oldest files name the
        vectors of a norm gamma and beta.

        Args:
          base: the first part of the names.
          known: predicates for known canonical names, in the order of priority.
        """
        names = {}
        for theirs in self._tensors.shapes:
            new = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", theirs)
            new = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", new)
            name = next((x for is_known in known for x in (new, base + new) if is_known(x)), new)
            if name in names:
                raise UserError(
                    f"{self.directory} holds {names[name]} and {theirs}, which are two names of one tensor: remove one"
                )
            names[name] = theirs
        return names

    @property
    def dtypes(self) -> dict[str, str]:
        """Returns the name of the dtype of each tensor, by its canonical name."""
        return {name: self._tensors.dtypes[theirs].name for name, theirs in self._theirs.items()}

    def notes(self) -> list[str]:
        """Returns messages about tensors that are converted and files that are ignored."""
        wide = sum(dtype == "float64" for dtype in self.dtypes.values())
        both = all(os.path.exists(os.path.join(self.directory, name)) for name in (SINGLE, INDEX))
        return [
            *([f"{wide} tensors of float64 were converted to float32"] if wide else []),
            *([f"{SINGLE} was read, as in transformers; the files of {INDEX} were ignored"] if both else []),
        ]

    def _is_float(self, name: str) -> bool:
        return jnp.issubdtype(self._tensors.dtypes[self._theirs[name]], jnp.floating)

    def _tensor(self, name: str) -> np.ndarray:
        return self._tensors[self._theirs[name]]

    def read(self, path: str, index: Index) -> np.ndarray:
        """Returns the block of a parameter at `index` as float32; raises UserError for non-finite numbers."""
        row, shape = self._rows[path]
        stacked = stacked_axes(row)
        names = np.array([name for name, _ in tensor_locations(row, shape)], object).reshape(shape[:stacked])
        tensor_names = np.asarray(names[tuple(index[:stacked])])
        blocks = [self._block(row, name, shape[stacked:], index[stacked:]) for name in tensor_names.flat]
        return np.stack(blocks).reshape(*tensor_names.shape, *blocks[0].shape)

    def _block(self, row: NameRow, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        block = np.ascontiguousarray(as_ours(row, self._tensor(name), shape)[index], np.float32)
        if not np.isfinite(block).all():
            # lists all damaged tensors after the first one is found
            broken = [x for x in self._theirs if self._is_float(x) and not np.isfinite(self._tensor(x)).all()]
            verb = "holds" if len(broken) == 1 else "hold"
            raise UserError(f"{self.directory}: {', '.join(broken)} {verb} numbers that are not finite: a damaged file")
        return block


def _names(rows: Rows) -> set[str]:
    """Returns the names of the tensors that contain the parameters of `rows`."""
    return {name for row, shape in rows.values() for name, _ in tensor_locations(row, shape)}
