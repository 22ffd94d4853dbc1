"""Reads the weights of a Hugging Face directory by PretrainAX parameter path."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np

from pretrainax import models
from pretrainax.checkpoints import manifest
from pretrainax.checkpoints.params import Index, Initializer
from pretrainax.config import Classify, Embed, ModelConfig, Tag, UserError
from pretrainax.interop.adaptations import suggested
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.dropout_rates import rate_notes
from pretrainax.interop.safetensors_files import INDEX, SINGLE, Reader
from pretrainax.interop.sentence_transformers import MODULES
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.param_paths import PyTree, flat, parameter_names
from pretrainax.storage.places import complete
from pretrainax.zoo.convert import Rows, as_ours, rows_of, shape_problems, stacked_axes, tensor_locations
from pretrainax.zoo.family import ConfigJson, NameRow, differences, without_heads

_MAX_FIELDS = 6  # maximum number of differing fields in an error message


def load_params(
    directory: str, model: ModelConfig, abstract_params: PyTree, fresh: Optional[Initializer] = None
) -> PyTree:
    """Loads the parameters of a model from a Hugging Face directory; each device reads its own shards.

    Args:
      model: config of the model to load.
      abstract_params: jax.ShapeDtypeStructs with shardings.
      fresh: function that initializes heads that the directory lacks. If None, the directory must contain all heads.

    Raises:
      UserError: the directory does not match the model (see `open_start`), or the files are incomplete or damaged.
    """
    verify_files(directory)
    source = open_start(directory, model, fresh is not None)
    source.verify()
    return source.params(abstract_params, fresh(source.missing_head_paths) if fresh is not None else {})


def open_model(directory: str) -> "DirectoryWeights":
    """Opens a Hugging Face directory whose model is used without changes.

    An encoder of sentence-transformers usually has no pretraining heads. It is opened as a retriever.

    Raises:
      UserError: the tensors do not match config.json.
    """
    if os.path.isfile(os.path.join(directory, MODULES)):
        source = DirectoryWeights(directory, fresh_heads=True)
        if source.missing_head_paths and source.config.family == "encoder":
            model = dataclasses.replace(without_heads(source.config), head=Embed.usual(source.config, 2))
            source.bind(model)
            source.config = model
            return source
    return DirectoryWeights(directory)


def open_start(directory: str, model: ModelConfig, fresh_heads: bool) -> "DirectoryWeights":
    """Opens a Hugging Face directory to initialize a run, and checks names and shapes without reading weights.

    Args:
      model: model config of the run. The model in `directory` must have the same config, but may have additional heads.
      fresh_heads: whether the heads may differ. If True, `missing_head_paths` of the result lists the head parameters
        that the directory lacks.

    Raises:
      UserError: the model configs differ, or the tensors do not match the model. The message lists the differences.
    """
    source = DirectoryWeights(directory, fresh_heads)
    prefix = f"config.checkpoint.init_from={directory} holds"
    theirs = source.config.stacks["encoder"] if takes_encoder(source.config, model) else source.config
    names = [
        name for name in differences(theirs, model) if not (is_head(name) and (fresh_heads or not getattr(model, name)))
    ]
    if theirs.family != model.family:
        raise UserError(
            f"{prefix} {source.architecture}, of family {source.config.family!r}, and config.model.family is "
            f"{model.family!r}: set a --config of the first family, or a directory of the second"
            f"{_adaptation_hint(source.config, model, names)}"
        )
    if names:
        raise other_architecture(directory, theirs, model, names)
    source.bind(model)
    return source


def takes_encoder(theirs: ModelConfig, ours: ModelConfig) -> bool:
    """Returns True if `ours` is an encoder that can be initialized from the encoder of `theirs`, an encoder-decoder.

    For example, T5ForTokenClassification in transformers is initialized in this way.
    """
    return (theirs.family, ours.family) == ("encoder_decoder", "encoder")


def other_architecture(
    directory: str, theirs: ModelConfig, ours: ModelConfig, names: Sequence[str], paths: Sequence[str] = ()
) -> UserError:
    """Creates the error for a run whose architecture differs from the architecture of the model that initializes it.

    Args:
      directory: location of the model.
      theirs: config of the model in `directory`.
      ours: model config of the run.
      names: names of the differing fields of the model config.
      paths: paths of the parameters that do not match.
    """
    fields = [f"config.model.{x} is {getattr(ours, x)!r}, there {getattr(theirs, x)!r}" for x in names]
    remainder = [f"and {len(fields) - _MAX_FIELDS} other fields"] if len(fields) > _MAX_FIELDS else []
    are_heads = {path.partition("/")[0] for path in paths} <= head_modules(theirs) | head_modules(ours)
    only_heads = are_heads if paths else all(map(is_head, names))
    hint = "; config.checkpoint.fresh_heads=True initializes heads" if only_heads else ""
    unmatched = f" ({', '.join(paths)} are missing, unused, or of another shape)" if paths else ""
    diff = "; ".join(fields[:_MAX_FIELDS] + remainder)
    return UserError(
        f"config.checkpoint.init_from={directory} holds another architecture{': ' if diff else ''}{diff}{unmatched}"
        f"{hint}{_adaptation_hint(theirs, ours, names)}"
    )


def _adaptation_hint(theirs: ModelConfig, ours: ModelConfig, names: Sequence[str]) -> str:
    """Returns a hint, for error messages, to the adaptations that convert `theirs` to `ours`; "" if there are none.

    Args:
      names: names of the differing fields of the model config.
    """
    adaptations = ", ".join(map(str, suggested(theirs, ours, names)))
    return f'; config.checkpoint.adapt="{adaptations}" converts the start' if adaptations else ""


def verify_files(directory: str) -> None:
    """Checks the files of a directory against its manifest, if it has one; raises UserError for changed files."""
    complete(directory)
    manifest_path = os.path.join(directory, manifest.MANIFEST)
    faults = [x for x in manifest.faults(directory) if "not in" not in x] if os.path.exists(manifest_path) else []
    if faults:
        raise UserError(f"{directory} does not match its {manifest.MANIFEST}: {', '.join(faults)}")


def is_head(field: str) -> bool:
    """Returns True if a field of ModelConfig configures a head."""
    return field.endswith("_head") or field in ("head", "replaced_token_context", "enhanced_mask_decoder")


def label_names(config_json: ConfigJson) -> tuple[str, ...]:
    """Returns the label names (id2label) in a config.json in the order of their ids, or () if they are invalid.

    The ids must be 0, 1, …, without gaps. As in transformers, a different `num_labels` makes the names invalid.
    transformers allows equal names, but the labels of a task must differ. Therefore equal names get the ids of the
    labels: {"0": "a", "1": "b", "2": "a"} -> ("a#0", "b", "a#2").
    """
    by_id = config_json.get("id2label")
    if not isinstance(by_id, dict) or sorted(by_id) != sorted(map(str, range(len(by_id)))):
        return ()
    if config_json.get("num_labels") not in (None, len(by_id)):
        return ()
    names = [str(by_id[str(i)]) for i in range(len(by_id))]
    return tuple(f"{name}#{i}" if names.count(name) > 1 else name for i, name in enumerate(names))


def _label_notes(config_json: ConfigJson, config: ModelConfig) -> Iterator[str]:
    """Yields a message if the labels of a task head do not have the names in config.json."""
    by_id, names = config_json.get("id2label"), label_names(config_json)
    if not isinstance(config.head, (Classify, Tag)) or not by_id or getattr(config.head, "kind", "") == "choice":
        return
    if not names:
        ids = ", ".join(map(str, by_id))
        yield (
            f"the names in id2label were replaced by LABEL_0, LABEL_1, …: its ids are {ids}, they must be 0 to "
            f"{int(config.head.num_labels) - 1}"
        )
    elif renamed := [name for name in names if name not in map(str, by_id.values())]:
        yield f"labels of equal names in id2label were renamed to {', '.join(renamed)}"


class DirectoryWeights:
    """The weights in a Hugging Face directory, by parameter path.

    Initially, the object contains the parameters of the model that config.json describes. The method `bind` selects a
    different model.

    Attributes:
      config: the model config that config.json describes.
      labels: label names of a classifier; () for other models.
      abstract: shapes of the parameters.
      missing_head_paths: paths of the head parameters that the directory lacks or that have different shapes.
    """

    def __init__(self, directory: str, fresh_heads: bool = False):
        """Opens the files, and matches the tensors to the model in config.json; raises UserError for a mismatch.

        Args:
          fresh_heads: whether heads may be missing.
        """
        self.directory, self._fresh_heads = directory, fresh_heads
        config_json = read_config_json(directory)
        self._family, self.config = described_model(config_json)
        self._config_notes = [
            *self._family.notes(config_json),
            *rate_notes(config_json, self._family, self.config),
            *_label_notes(config_json, self.config),
        ]
        architectures = config_json.get("architectures")
        self.architecture = (
            str(architectures[0])
            if architectures and isinstance(architectures, list)
            else self._family.class_of(self.config)
        )
        self.labels = label_names(config_json)
        if config_json.get("quantization_config"):
            raise UserError(f"{directory} is quantized (quantization_config of config.json), which is not supported")
        self._tensors = Reader(directory)
        self.bind(self.config)

    def bind(self, config: ModelConfig) -> None:
        """Matches the parameters of a model with the given config to the tensors in the directory.

        Raises:
          UserError: tensors are missing, unknown, quantized or of the wrong shape. The message lists these tensors.
        """
        self.abstract, table = models.abstract_params(config), self._family.names(config)
        shapes, named_paths, heads = flat(self.abstract), {row.path for row in table}, head_modules(config)
        # The head parameters that no transformers class of the family has. The run initializes them.
        unnamed = [path for path in shapes if path not in named_paths and path.partition("/")[0] in heads]
        self._initialized = unnamed if self._fresh_heads else []
        try:
            self._rows = rows_of(table, {path: x for path, x in shapes.items() if path not in self._initialized})
        except ValueError as e:
            raise UserError(f"{self.directory}: no {self._family.model_type} fits its config.json: {e}") from e
        self._tied, self._zeros = self._family.tied(config), self._family.zeros(config)
        stored_rows = rows_of(self._family.names(self.config), models.abstract_params(self.config))
        required = _names(self._rows) | self._tied.keys() | self._zeros.keys()
        ignored = re.compile("|".join((*self._family.ignored, "(?!)")))
        base = self._rows["token_embedding/embedding"][0].name.partition(".")[0] + "."
        known_predicates = (required.__contains__, _names(stored_rows).__contains__, ignored.fullmatch)
        self._file_names = self._by_canonical_name(base, known_predicates)
        for copy, original in self._tied.items():  # a file may contain only one of two tied tensors
            if copy in self._file_names:
                self._file_names.setdefault(original, self._file_names[copy])
        has_class = config.head is None and self.architecture == self._family.class_of(config)
        copied = self._family.copied(config) if has_class else {}
        self._copied = {
            copy: original
            for copy, original in copied.items()
            if copy in required and copy not in self._file_names and original in self._file_names
        }
        self._file_names |= {copy: self._file_names[original] for copy, original in self._copied.items()}
        self._check(
            config, [name for name in self._file_names if not any(is_known(name) for is_known in known_predicates)]
        )
        present = sorted(_names(self._rows) & self._file_names.keys())
        quantized = [f"{name} is {self.dtypes[name]}" for name in present if not self._is_float(name)]
        if quantized:
            raise UserError(f"{self.directory} is quantized, which is not supported: {', '.join(quantized)}")

    def _check(self, config: ModelConfig, unknown: list[str]) -> None:
        """Sets `missing_head_paths`; raises UserError for tensors that are missing, unknown or of the wrong shape.

        Args:
          unknown: names of the tensors in the directory that no transformers class of the family has.
        """
        shapes = {name: self._tensors.shapes[theirs] for name, theirs in self._file_names.items()}
        heads = head_modules(config)
        modules: dict[str, Rows] = {}  # rows by module path; a linear layer or norm is present or absent as a unit
        for path, row in self._rows.items():
            if path.partition("/")[0] in heads:
                modules.setdefault(path.rpartition("/")[0], {})[path] = row
        absent = {name: rows for name, rows in modules.items() if self._is_absent(rows, shapes)}
        self.missing_head_paths = [path for rows in absent.values() for path in rows] + self._initialized
        present = {path: row for path, row in self._rows.items() if path not in self.missing_head_paths}
        problems = shape_problems(present, shapes, unknown)
        if problems and not self._fresh_heads:
            problems = shape_problems(self._rows, shapes, unknown)
        if problems:
            raise UserError(
                f"{self.directory}: the weights do not match its config.json: {'; '.join(problems)}"
                f"{self._unsupported_class()}"
            )
        if absent and not self._fresh_heads:
            missing = ", ".join(sorted(name for rows in absent.values() for name in _names(rows)))
            raise UserError(
                f"{self.directory} ({self.architecture}) is a model without {', '.join(absent)}: it lacks {missing}. "
                f"To pretrain from it with fresh heads: --config.checkpoint.init_from={self.directory} "
                '--config.checkpoint.fresh_heads=True; to add fresh heads with transformers: python -c "from '
                f"transformers import {self._family.class_of(config)} as M; M.from_pretrained('{self.directory}')"
                ".save_pretrained('with_heads')\", and copy its tokenizer files there"
            )

    def _unsupported_class(self) -> str:
        """Returns a note for error messages if config.json names a class that this package does not have, else ""."""
        classifiers = [classifier.architecture for classifier in self._family.classifiers]
        supported = [self._family.class_of(dataclasses.replace(self.config, head=None)), *classifiers]
        if self.architecture in supported or self.architecture.endswith("Model"):
            return ""
        return f"; its class is {self.architecture}, supported: {', '.join(supported)}"

    def _is_absent(self, rows: Rows, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns True if a head module must be initialized, because its tensors are missing or have other shapes.

        Args:
          rows: tensor names of the module's parameters, by parameter path.
          shapes: shape of each tensor in the directory, by canonical name.
        """
        names = _names(rows)
        has_other_shape = self._fresh_heads and names <= shapes.keys() and shape_problems(rows, shapes)
        return not names & shapes.keys() or bool(has_other_shape)

    def verify(self) -> None:
        """Raises UserError if two tied tensors differ, or if a tensor that must be zero is not zero."""
        for copy, original in self._tied.items():
            if copy in self._file_names and not np.array_equal(self._tensor(copy), self._tensor(original)):
                raise UserError(f"{self.directory}: {copy} differs from {original}, but config.json ties them")
        for name in self._zeros:
            if name in self._file_names and self._tensor(name).any():
                raise UserError(f"{self.directory}: {name} is not zero, but this model has no such parameter")

    def params(self, abstract_params: PyTree, drawn: Mapping[str, jax.Array] = MappingProxyType({})) -> PyTree:
        """Loads all parameters as sharded arrays; each device reads its own shards.

        Args:
          abstract_params: jax.ShapeDtypeStructs with shardings.
          drawn: parameters that are already initialized, by path. They are returned instead of stored parameters.
        """
        leaves = [
            drawn[path]
            if path in drawn
            else jax.make_array_from_callback(x.shape, x.sharding, lambda index, path=path: self.read(path, index))
            for path, x in zip(parameter_names(abstract_params), jax.tree.leaves(abstract_params), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract_params), leaves)

    def _by_canonical_name(self, base: str, known_predicates: Iterable[Callable[[str], object]]) -> dict[str, str]:
        """Maps canonical tensor names to the names in the files.

        In the files of a base model without heads, tensor names lack a prefix, for example "bert.". The oldest files
        call the parameters of a norm gamma and beta.

        Args:
          base: the prefix, for example "bert.".
          known_predicates: predicates for known canonical names, in order of priority.

        Raises:
          UserError: the files contain a tensor under two names.
        """
        names = {}
        for theirs in self._tensors.shapes:
            new = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", theirs)
            new = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", new)
            name = next((x for is_known in known_predicates for x in (new, base + new) if is_known(x)), new)
            if name in names:
                raise UserError(
                    f"{self.directory} holds {names[name]} and {theirs}, which are two names of one tensor: remove one"
                )
            names[name] = theirs
        return names

    @property
    def dtypes(self) -> dict[str, str]:
        """Returns the dtype name of each tensor, by canonical tensor name."""
        return {name: self._tensors.dtypes[theirs].name for name, theirs in self._file_names.items()}

    def notes(self) -> list[str]:
        """Returns messages about config.json, copied and converted tensors, and files that are ignored."""
        num_converted = sum(dtype == "float64" for dtype in self.dtypes.values())
        has_both = all(os.path.exists(os.path.join(self.directory, name)) for name in (SINGLE, INDEX))
        return [
            *self._config_notes,
            *(f"{x} is a copy of {y}; transformers ties them, here both are trained" for x, y in self._copied.items()),
            *([f"{num_converted} tensors of float64 were converted to float32"] if num_converted else []),
            *([f"{SINGLE} was read, as in transformers; the files of {INDEX} were ignored"] if has_both else []),
        ]

    def _is_float(self, name: str) -> bool:
        return jnp.issubdtype(self._tensors.dtypes[self._file_names[name]], jnp.floating)

    def _tensor(self, name: str) -> np.ndarray:
        return self._tensors[self._file_names[name]]

    def read(self, path: str, index: Index) -> np.ndarray:
        """Reads the slice `index` of the parameter `path` as float32; raises UserError for non-finite values."""
        row, shape = self._rows[path]
        stacked = stacked_axes(row)
        names = np.array([name for name, _ in tensor_locations(row, shape)], object).reshape(shape[:stacked])
        tensor_names = np.asarray(names[tuple(index[:stacked])])
        blocks = [self._read_block(row, name, shape[stacked:], index[stacked:]) for name in tensor_names.flat]
        return np.stack(blocks).reshape(*tensor_names.shape, *blocks[0].shape)

    def _read_block(self, row: NameRow, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        block = np.ascontiguousarray(as_ours(row, self._tensor(name), shape)[index], np.float32)
        if not np.isfinite(block).all():
            # After the first damaged tensor, searches all tensors, so that the message lists every damaged tensor.
            broken = [x for x in self._file_names if self._is_float(x) and not np.isfinite(self._tensor(x)).all()]
            verb = "holds" if len(broken) == 1 else "hold"
            raise UserError(f"{self.directory}: {', '.join(broken)} {verb} numbers that are not finite: a damaged file")
        return block


def _names(rows: Rows) -> set[str]:
    """Returns the names of all tensors that contain the parameters in `rows`."""
    return {name for row, shape in rows.values() for name, _ in tensor_locations(row, shape)}
