"""The weights of a Hugging Face directory, read by the paths of our parameters."""

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
from pretrainax.checkpoints.params import Fresh, Index
from pretrainax.config import ModelConfig, UserError
from pretrainax.interop.adaptations import suggested
from pretrainax.interop.architectures import described_model, read_config_json
from pretrainax.interop.safetensors_files import INDEX, SINGLE, Reader
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.param_paths import PyTree, flat, parameter_names
from pretrainax.storage.places import complete
from pretrainax.zoo.convert import Rows, places, rows_of, shape_problems, stacked_axes, view
from pretrainax.zoo.family import ConfigJson, Row, differences

_MOST_FIELDS = 6  # of another architecture that an error names


def load_params(directory: str, model: ModelConfig, abstract_params: PyTree, fresh: Optional[Fresh] = None) -> PyTree:
    """Reads the parameters of a Hugging Face directory, each device reading its own shards.

    Args:
      abstract_params: jax.ShapeDtypeStructs with shardings.
      fresh: gives the parameters of heads that the directory lacks; None: it must have them all.

    Raises:
      UserError: as `open_start` does; or the numbers are not those of a whole directory.
    """
    verify_files(directory)
    source = open_start(directory, model, fresh is not None)
    source.verify()
    return source.params(abstract_params, fresh(source.lacking) if fresh is not None else {})


def open_start(directory: str, model: ModelConfig, fresh_heads: bool) -> "DirectoryWeights":
    """Opens a Hugging Face directory as the start of a run. Names and shapes are checked, no number is read.

    Args:
      model: of the run; what `directory` computes must be the same, but for heads that the run does without.
      fresh_heads: of heads the run may have others; `lacking` names the parameters that the directory has not.

    Raises:
      UserError: another architecture, with the fields; or tensors that are not those of the model.
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
            f"{model.family!r}: take a --config of that model, or a directory of this one"
            f"{_adaptable(source.config, model, names)}"
        )
    if names:
        raise other_architecture(directory, theirs, model, names)
    source.bind(model)
    return source


def takes_encoder(theirs: ModelConfig, ours: ModelConfig) -> bool:
    """Returns True if a model starts from an encoder-decoder's encoder alone, as T5ForTokenClassification does."""
    return (theirs.family, ours.family) == ("encoder_decoder", "encoder")


def other_architecture(
    directory: str, theirs: ModelConfig, ours: ModelConfig, names: Sequence[str], paths: Sequence[str] = ()
) -> UserError:
    """Returns the error for a start that is of another model.

    Args:
      names: fields of config.model in which they differ.
      paths: of parameters that do not fit.
    """
    fields = [f"config.model.{x} is {getattr(ours, x)!r}, there {getattr(theirs, x)!r}" for x in names]
    more = [f"and {len(fields) - _MOST_FIELDS} other fields"] if len(fields) > _MOST_FIELDS else []
    of_heads = {path.partition("/")[0] for path in paths} <= head_modules(theirs) | head_modules(ours)
    only_heads = of_heads if paths else all(map(is_head, names))
    heads = "; config.checkpoint.fresh_heads=True makes heads anew" if only_heads else ""
    lost = f" ({', '.join(paths)} are not there, not wanted, or of another shape)" if paths else ""
    said = "; ".join(fields[:_MOST_FIELDS] + more)
    return UserError(
        f"config.checkpoint.init_from={directory} holds another architecture{': ' if said else ''}{said}{lost}{heads}"
        f"{_adaptable(theirs, ours, names)}"
    )


def _adaptable(theirs: ModelConfig, ours: ModelConfig, names: Sequence[str]) -> str:
    """Returns which adaptations make a model that differs in these fields alone of a start; "" where none do."""
    kinds = ", ".join(map(str, suggested(theirs, ours, names)))
    return f'; config.checkpoint.adapt="{kinds}" makes the one of the other' if kinds else ""


def verify_files(directory: str) -> None:
    """Reads a directory against its checksums, where it has them; UserError for a file that is another one."""
    complete(directory)
    listed = os.path.join(directory, manifest.MANIFEST)
    faults = [x for x in manifest.faults(directory) if "not in" not in x] if os.path.exists(listed) else []
    if faults:
        raise UserError(f"{directory} is not what its {manifest.MANIFEST} says: {', '.join(faults)}")


def is_head(field: str) -> bool:
    """Tells fields of ModelConfig that ask for heads."""
    return field.endswith("_head") or field in ("head", "replaced_token_context", "enhanced_mask_decoder")


def label_names(config_json: ConfigJson) -> tuple[str, ...]:
    """Returns the names of the labels in the order of their numbers; () where config.json names none."""
    names = config_json.get("id2label")
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        return ()
    return tuple(str(names[str(i)]) for i in range(len(names)))


class DirectoryWeights:
    """The weights of a directory, by the paths of our parameters.

    `labels` are the names of what a head of a whole row says, `config` is the model that its config.json describes,
    `abstract` the shapes of the parameters that are bound, `lacking` the paths of those among them, of heads, that the
    directory does not have.
    """

    def __init__(self, directory: str, fresh_heads: bool = False):
        """Opens the files and binds the parameters of `config`; UserError for whatever is not as it must be.

        fresh_heads: heads need not be there.
        """
        self.directory, self._fresh_heads = directory, fresh_heads
        config_json = read_config_json(directory)
        self._family, self.config = described_model(config_json)
        named = config_json.get("architectures")
        self.architecture = str(named[0]) if named and isinstance(named, list) else self._family.class_of(self.config)
        self.labels = label_names(config_json)
        if config_json.get("quantization_config"):
            raise UserError(f"{directory} is quantized (quantization_config of config.json), which is not read")
        self._tensors = Reader(directory)
        self.bind(self.config)

    def bind(self, config: ModelConfig) -> None:
        """Finds each parameter of `config` among the tensors; UserError names all that are missing or unknown."""
        self.abstract, table = models.abstract_params(config), self._family.names(config)
        shapes, named, heads = flat(self.abstract), {row.path for row in table}, head_modules(config)
        # of a head, or a part of it, that no class of the family has, all is drawn
        unnamed = [path for path in shapes if path not in named and path.partition("/")[0] in heads]
        self._drawn = unnamed if self._fresh_heads else []
        try:
            self._rows = rows_of(table, {path: x for path, x in shapes.items() if path not in self._drawn})
        except ValueError as e:
            raise UserError(f"{self.directory}: no {self._family.model_type} is as its config.json says: {e}") from e
        self._tied, self._zeros = self._family.tied(config), self._family.zeros(config)
        own = rows_of(self._family.names(self.config), models.abstract_params(self.config))
        wanted = _names(self._rows) | self._tied.keys() | self._zeros.keys()
        ignored = re.compile("|".join((*self._family.ignored, "(?!)")))
        base = self._rows["token_embedding/embedding"][0].name.partition(".")[0] + "."
        known = (wanted.__contains__, _names(own).__contains__, ignored.fullmatch)
        self._theirs = self._by_canonical_name(base, known)
        for copy, original in self._tied.items():  # a file may hold either
            if copy in self._theirs:
                self._theirs.setdefault(original, self._theirs[copy])
        self._check(config, [name for name in self._theirs if not any(is_known(name) for is_known in known)])
        there = sorted(_names(self._rows) & self._theirs.keys())
        coded = [f"{name} is {self.dtypes[name]}" for name in there if not self._is_float(name)]
        if coded:
            raise UserError(f"{self.directory} is quantized, which is not read: {', '.join(coded)}")

    def _check(self, config: ModelConfig, unknown: list[str]) -> None:
        """Raises a UserError for tensors that are not as they must be; sets `lacking`."""
        found = {name: self._tensors.shapes[theirs] for name, theirs in self._theirs.items()}
        heads = head_modules(config)
        maps: dict[str, Rows] = {}  # of heads: a head's linear map, its norm: what can be there or not
        for path, row in self._rows.items():
            if path.partition("/")[0] in heads:
                maps.setdefault(path.rpartition("/")[0], {})[path] = row
        absent = {name: rows for name, rows in maps.items() if self._is_absent(rows, found)}
        self.lacking = [path for rows in absent.values() for path in rows] + self._drawn
        there = {path: row for path, row in self._rows.items() if path not in self.lacking}
        problems = shape_problems(there, found, unknown)
        if problems and not self._fresh_heads:
            problems = shape_problems(self._rows, found, unknown)
        if problems:
            raise UserError(
                f"{self.directory}: the weights are not those that its config.json describes: {'; '.join(problems)}"
            )
        if absent and not self._fresh_heads:
            lost = ", ".join(sorted(name for rows in absent.values() for name in _names(rows)))
            raise UserError(
                f"{self.directory} ({self.architecture}) is a model without {', '.join(absent)}: it lacks {lost}. To "
                f"pretrain from it, with these fresh: --config.checkpoint.init_from={self.directory} "
                '--config.checkpoint.fresh_heads=True; to write it with fresh ones, by transformers: python -c "from '
                f"transformers import {self._family.class_of(config)} as M; M.from_pretrained('{self.directory}')"
                ".save_pretrained('with_heads')\", and copy its tokenizer's files there"
            )

    def _is_absent(self, rows: Rows, found: Mapping[str, tuple[int, ...]]) -> bool:
        """Tells a map of a head that is not there, or which may be drawn anew and is that of another task."""
        names = _names(rows)
        of_another = self._fresh_heads and names <= found.keys() and shape_problems(rows, found)
        return not names & found.keys() or bool(of_another)

    def verify(self) -> None:
        """Compares the copies of tied tensors, which a name and a shape do not tell; UserError where they differ."""
        for copy, original in self._tied.items():
            if copy in self._theirs and not np.array_equal(self._tensor(copy), self._tensor(original)):
                raise UserError(f"{self.directory}: {copy} differs from {original}, to which config.json ties it")
        for name in self._zeros:
            if name in self._theirs and self._tensor(name).any():
                raise UserError(f"{self.directory}: {name} is not zero, and no part of this architecture here")

    def params(self, abstract_params: PyTree, drawn: Mapping[str, jax.Array] = MappingProxyType({})) -> PyTree:
        """Reads all parameters into their shards; those of the paths of `drawn` are taken from there.

        Args:
          abstract_params: jax.ShapeDtypeStructs with shardings.
        """
        leaves = [
            drawn[path]
            if path in drawn
            else jax.make_array_from_callback(x.shape, x.sharding, lambda index, path=path: self.read(path, index))
            for path, x in zip(parameter_names(abstract_params), jax.tree.leaves(abstract_params), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract_params), leaves)

    def _by_canonical_name(self, base: str, known: Iterable[Callable[[str], object]]) -> dict[str, str]:
        """Returns {the name that a table has: the name in the file}; UserError for two names of one tensor.

        Files of a bare base model leave out the first part of their names (`base`: "bert."), and the oldest call the
        two vectors of a norm gamma and beta.
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
        """The dtype of each tensor, by its canonical name."""
        return {name: self._tensors.dtypes[theirs].name for name, theirs in self._theirs.items()}

    def notes(self) -> list[str]:
        """Says what of the directory is not taken as it is."""
        wide = sum(dtype == "float64" for dtype in self.dtypes.values())
        both = all(os.path.exists(os.path.join(self.directory, name)) for name in (SINGLE, INDEX))
        return [
            *([f"{wide} tensors of float64 became float32"] if wide else []),
            *([f"{SINGLE} was read, as transformers does, and not the files of {INDEX}"] if both else []),
        ]

    def _is_float(self, name: str) -> bool:
        return jnp.issubdtype(self._tensors.dtypes[self._theirs[name]], jnp.floating)

    def _tensor(self, name: str) -> np.ndarray:
        return self._tensors[self._theirs[name]]

    def read(self, path: str, index: Index) -> np.ndarray:
        """Reads the block of a parameter at `index`, as float32; UserError for numbers that are not finite."""
        row, shape = self._rows[path]
        stacked = stacked_axes(row)
        names = np.array([name for name, _ in places(row, shape)], object).reshape(shape[:stacked])
        wanted = np.asarray(names[tuple(index[:stacked])])
        blocks = [self._block(row, name, shape[stacked:], index[stacked:]) for name in wanted.flat]
        return np.stack(blocks).reshape(*wanted.shape, *blocks[0].shape)

    def _block(self, row: Row, name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
        block = np.ascontiguousarray(view(row, self._tensor(name), shape)[index], np.float32)
        if not np.isfinite(block).all():
            # all of them are looked through only now that one is known
            named = [x for x in self._theirs if self._is_float(x) and not np.isfinite(self._tensor(x)).all()]
            verb = "holds" if len(named) == 1 else "hold"
            raise UserError(f"{self.directory}: {', '.join(named)} {verb} numbers that are not finite: a damaged file")
        return block


def _names(rows: Rows) -> set[str]:
    """Returns the names of all tensors of these rows."""
    return {name for row, shape in rows.values() for name, _ in places(row, shape)}
