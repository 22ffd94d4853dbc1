"""Reads ELMo's released files on import: options.json, the HDF5 weights of bilm-tf, and the vocabulary.

A directory contains options.json, one *.hdf5 file, and one vocab*.txt file with one word per line. The options
determine the names and shapes of the datasets in the HDF5 file. Only these datasets are read. Links and data in
external files are not read.

The files do not contain the output softmax layer over words. Its parameters are set to zero on import, so continued
pretraining starts from a zero softmax layer. A run that trains a task head drops the softmax
(`config.checkpoint.fresh_heads=True`).

NOTE The model reads a word outside the vocabulary as <UNK>, as all PretrainAX models do (`data/word_characters.py`).
bilm-tf reads the characters of this word instead.
"""

import dataclasses
import glob
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pretrainax import models
from pretrainax.checkpoints.params import Index
from pretrainax.config import NUM_CHARACTERS, WORD_LENGTH, ModelConfig, Recurrent, UserError
from pretrainax.files.extras import import_extra
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.layers.recurrent import recurrent_of
from pretrainax.sharding.param_paths import flat
from pretrainax.tokenization.base import Tokenizer
from pretrainax.tokenization.words import Words
from pretrainax.zoo.elmo import elmo

if TYPE_CHECKING:
    import h5py

OPTIONS = "options.json"
_HEADS = "unembedding/"  # path prefix of the parameters that the files lack
# Direction of the LSTM -> group of datasets in the HDF5 file.
_GROUPS = {"forward": "RNN_0", "backward": "RNN_1"}
_MAX_SIZE = 2**20  # maximum of each size in the options


def is_elmo(directory: str) -> bool:
    """Returns True if a directory contains ELMo's released files, that is, options.json but no config.json."""
    names = set(os.listdir(directory)) if os.path.isdir(directory) else set()
    return OPTIONS in names and "config.json" not in names


class _Source(NamedTuple):
    """The HDF5 datasets that store a parameter, and the function that converts them."""

    names: tuple[str, ...]  # dataset names: one per layer for stacked parameters, otherwise a single name
    shape: tuple[int, ...]  # shape of each dataset
    ours: Callable[[np.ndarray], np.ndarray]  # converts a dataset to the parameter, or to one layer of the parameter


class ElmoFiles:
    """ELMo's released weights, read by parameter path.

    Attributes:
      tokenizer: the tokenizer for the vocabulary file.
      config: the model config from options.json.
      abstract: shapes of the parameters.
    """

    labels: tuple[str, ...] = ()  # ELMo has no task head

    def __init__(self, directory: str):
        """Opens the files and checks the names and shapes of all datasets; raises UserError for invalid files."""
        options = os.path.join(directory, OPTIONS)
        self._path, vocabulary = (_find_file(directory, pattern) for pattern in ("*.hdf5", "vocab*.txt"))
        self.tokenizer: Tokenizer = Words(path=vocabulary).load()
        self.config = _config(read_object(options), options, self.tokenizer.vocabulary.size)
        self.abstract = models.abstract_params(self.config)
        self._file = _open_hdf5(self._path)
        self._sources = _sources(self.config)
        for source in self._sources.values():
            for name in source.names:
                self._dataset(name, source.shape)

    def read(self, path: str, index: Index) -> np.ndarray:
        """Reads the slice `index` of the parameter `path` as float32; raises UserError for non-finite values.

        The output softmax is not in the files and is returned as zeros.
        """
        if path.startswith(_HEADS):
            return np.broadcast_to(np.float32(0), flat(self.abstract)[path].shape)[index]
        source = self._sources[path]
        blocks = [source.ours(self._read_dataset(name, source.shape)) for name in source.names]
        return np.ascontiguousarray((np.stack(blocks) if "/blocks/" in path else blocks[0])[index])

    def notes(self) -> list[str]:
        """Returns messages about parameters that the files lack, and about unused datasets."""
        read = {name for source in self._sources.values() for name in source.names}
        unused: list[str] = []
        self._file.visititems(lambda name, x: unused.append(name) if hasattr(x, "dtype") and name not in read else None)
        unread = f"; left unread: {', '.join(unused)}" if unused else ""
        return [f"the softmax over words is in no file of ELMo: it is zero{unread}"]

    def _read_dataset(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        numbers = np.asarray(self._dataset(name, shape)[()], np.float32)
        if not np.isfinite(numbers).all():
            raise UserError(f"{self._path}: {name} holds numbers that are not finite: a damaged file")
        return numbers

    def _dataset(self, name: str, shape: tuple[int, ...]) -> "h5py.Dataset":
        """Returns the dataset `name`; raises UserError if the dataset is missing, external or of a different shape."""
        import h5py

        dataset: object = self._file
        for part in name.split("/"):
            if not isinstance(dataset, h5py.Group) or not isinstance(dataset.get(part, getlink=True), h5py.HardLink):
                raise UserError(f"{self._path} has no dataset {name}, which {OPTIONS} asks for")
            dataset = dataset[part]
        if not isinstance(dataset, h5py.Dataset) or dataset.is_virtual or dataset.external:
            raise UserError(f"{self._path}: {name} is no dataset of this file itself")
        if dataset.shape != shape or dataset.dtype.kind != "f":
            actual = f"{dataset.dtype}{list(dataset.shape or ())}"
            raise UserError(f"{self._path}: {name} is {actual}, and {OPTIONS} asks for float32{list(shape)}")
        return dataset


def _find_file(directory: str, pattern: str) -> str:
    paths = [path for path in glob.glob(os.path.join(glob.escape(directory), pattern)) if os.path.isfile(path)]
    if len(paths) != 1:
        raise UserError(
            f"{directory} has {len(paths)} files {pattern}, and {OPTIONS} of ELMo: there must be one; ELMo has one "
            "file of weights *.hdf5 and one vocabulary vocab*.txt with a word per line"
        )
    return paths[0]


def _open_hdf5(path: str) -> "h5py.File":
    h5py = import_extra("h5py", "elmo", path)
    try:
        return h5py.File(path, "r")
    except OSError as e:
        raise UserError(f"{path} is no HDF5 file, or a damaged one ({e})") from e


def _config(options: JsonObject, path: str, vocabulary_size: int) -> ModelConfig:
    """Converts the contents of options.json to a model config; raises UserError for unsupported options.

    Args:
      path: path of options.json, for messages.
      vocabulary_size: number of words in the vocabulary.
    """
    try:
        lstm, cnn = options["lstm"], options["char_cnn"]
        filters = [count for _, count in cnn["filters"]]
        sizes = {
            **{f"lstm.{name}": lstm[name] for name in ("projection_dim", "dim", "n_layers", "cell_clip")},
            **{f"char_cnn.filters of {size} characters": count for size, count in cnn["filters"]},
            "char_cnn.embedding.dim": cnn["embedding"]["dim"],
            "char_cnn.n_highway": cnn["n_highway"],
        }
        required_values = {
            "lstm.use_skip_connections": (lstm["use_skip_connections"], True),
            "lstm.proj_clip": (lstm["proj_clip"], lstm["cell_clip"]),
            "char_cnn.activation": (cnn["activation"], "relu"),
            "char_cnn.filters": ([size for size, _ in cnn["filters"]], list(range(1, len(filters) + 1))),
            "char_cnn.n_characters": (cnn["n_characters"], NUM_CHARACTERS),
            "char_cnn.max_characters_per_token": (cnn["max_characters_per_token"], WORD_LENGTH),
        }
    except (KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} is no options.json of ELMo ({type(e).__name__}: {e})") from e
    for name, size in sizes.items():
        is_number = isinstance(size, (int, float) if name.endswith("clip") else int) and not isinstance(size, bool)
        if not is_number or not 0 < size <= _MAX_SIZE:
            raise UserError(f"{path} has {name} {size!r}, it must be a number from 1 to {_MAX_SIZE:,}")
    for name, (value, supported) in required_values.items():
        if value != supported:
            raise UserError(f"{path} has {name} {value!r}; only {supported!r} is supported")
    settings = Recurrent(cnn["embedding"]["dim"], tuple(filters), cnn["n_highway"], float(lstm["cell_clip"]))
    return dataclasses.replace(
        elmo("original"),
        vocab_size=vocabulary_size,
        num_layers=lstm["n_layers"],
        d_model=lstm["projection_dim"],
        d_ff=lstm["dim"],
        parts=(settings,),
    )


def _sources(config: ModelConfig) -> dict[str, _Source]:
    """Maps the path of each parameter to the bilm-tf datasets in the HDF5 file that store it.

    bilm-tf matrices are [in, out], and the LSTM gates are in the order i, j, f, o.
    """
    settings, width, cell_size = recurrent_of(config), config.d_model, config.d_ff
    assert settings is not None
    total, embedding_path = sum(settings.filters), "character_embedding"
    # The first row of the table is for padding. It is missing from the file and set to zero.
    table = _Source(
        ("char_embed",), (NUM_CHARACTERS - 1, settings.character_dim), lambda x: np.pad(x, ((1, 0), (0, 0)))
    )
    sources = {f"{embedding_path}/embedding": table}

    def linear(path: str, kernel: str, bias: str, inputs: int, outputs: int) -> None:
        sources[f"{path}/kernel"] = _Source((kernel,), (inputs, outputs), _identity)
        sources[f"{path}/bias"] = _Source((bias,), (outputs,), _identity)

    for i, count in enumerate(settings.filters):
        path, shape = f"{embedding_path}/convolution_{i + 1}", (1, i + 1, settings.character_dim, count)
        sources[f"{path}/kernel"] = _Source((f"CNN/W_cnn_{i}",), shape, lambda x: x[0])
        sources[f"{path}/bias"] = _Source((f"CNN/b_cnn_{i}",), (count,), _identity)
    for i in range(settings.highways):
        for name in ("carry", "transform"):
            group = f"CNN_high_{i}"
            linear(f"{embedding_path}/highway_{i}/{name}", f"{group}/W_{name}", f"{group}/b_{name}", total, total)
    linear(f"{embedding_path}/projection", "CNN_proj/W_proj", "CNN_proj/b_proj", total, width)
    for name, group in _GROUPS.items():
        cells = [f"{group}/RNN/MultiRNNCell/Cell{i}/LSTMCell" for i in range(config.num_layers)]
        gate_kernels, bias, projections = (tuple(f"{cell}/{x}" for cell in cells) for x in ("W_0", "B", "W_P_0"))
        block, shape = f"recurrent/blocks/{name}", (2 * width, 4 * cell_size)
        # [2 D, 4 F] -> [D, 4, F]: the first D rows are for the input, the last D rows for the recurrent output.
        sources[f"{block}/input/kernel"] = _Source(
            gate_kernels, shape, lambda x: x[:width].reshape(width, 4, cell_size)
        )
        sources[f"{block}/cell/hidden/kernel"] = _Source(
            gate_kernels, shape, lambda x: x[width:].reshape(width, 4, cell_size)
        )
        sources[f"{block}/input/bias"] = _Source(bias, (4 * cell_size,), lambda x: x.reshape(4, cell_size))
        sources[f"{block}/cell/projection/kernel"] = _Source(projections, (cell_size, width), _identity)
    return sources


def _identity(x: np.ndarray) -> np.ndarray:
    return x
