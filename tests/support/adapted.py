"""Loads starts of another family or shape, as a run loads them."""

import pathlib
import zlib

import jax
import numpy as np

from pretrainax import models
from pretrainax.config import MeshConfig, ModelConfig
from pretrainax.interop.adaptations import Adaptation
from pretrainax.interop.adapted_start import ConversionPlan, adapted_start
from pretrainax.interop.origin import find_origin
from pretrainax.interop.start import load_start, placed_start, zeros_of
from pretrainax.sharding.mesh import make_mesh
from pretrainax.sharding.param_paths import flat
from pretrainax.sharding.rules import tree_shardings


def planned(start: pathlib.Path, model: ModelConfig, *adaptations: Adaptation, fresh_heads=False) -> ConversionPlan:
    """Returns the plan that converts a run or a directory to a model."""
    return adapted_start(find_origin(str(start)), model, adaptations, fresh_heads)


def read(start: pathlib.Path, adapted: ConversionPlan, mesh=None):
    """Loads the parameters of the start that the model uses, with their stored values."""
    abstract = placed_start(models.abstract_params(adapted.model), mesh or _one_device())
    return load_start(find_origin(str(start)), adapted.model, abstract, zeros_of(abstract))


def noise(path: str, shape) -> np.ndarray:
    """Returns values for newly initialized parameters, large enough to reveal a wrong placement."""
    return np.random.RandomState(zlib.crc32(path.encode())).standard_normal(shape).astype(np.float32)


def taken(start: pathlib.Path, model: ModelConfig, *adaptations: Adaptation, fresh_heads=False, mesh=None):
    """Returns the parameters of the model; `noise` replaces the newly initialized ones."""
    adapted, mesh = planned(start, model, *adaptations, fresh_heads=fresh_heads), mesh or _one_device()
    shapes = models.abstract_params(model)
    shardings = tree_shardings(mesh, shapes)
    drawn = {
        path: jax.device_put(noise(path, flat(shapes)[path].shape), flat(shardings)[path]) for path in adapted.drawn
    }
    return adapted.take(read(start, adapted, mesh), shardings, drawn)


def _one_device() -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])
