"""The parameters that a run starts from: those of another run, of one under tuning too, or a Hugging Face directory.

A run under tuning stores what it trains. What it does not train is read from its start whenever it is used, so
`start.json` in its folder says what that was: which checkpoint, and a digest of it.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import NamedTuple, Optional, cast

import jax
import jax.numpy as jnp

from pretrainax import adapt, config, models
from pretrainax.adapt.tuning import flat, nested
from pretrainax.checkpoints.manifest import MANIFEST
from pretrainax.checkpoints.params import TRAINED, Fresh, Params, lacking_parameters, load_params, load_steps
from pretrainax.checkpoints.steps import find_checkpoint, list_steps
from pretrainax.config import Experiment, ModelConfig, UserError
from pretrainax.config.atomic_files import write_atomically
from pretrainax.config.json_files import read_object
from pretrainax.interop import weights
from pretrainax.interop.architectures import is_huggingface_directory
from pretrainax.layers.compute import Compute
from pretrainax.models.heads.base import head_modules
from pretrainax.sharding.param_paths import PyTree, parameter_names
from pretrainax.sharding.rules import tree_shardings, with_shardings

_START = "start.json"


class Start(NamedTuple):
    """Names what a run starts from."""

    directory: str  # of another run, or of Hugging Face
    step: Optional[int] = None  # of the run there; None: its newest checkpoint that verifies


def is_workdir(directory: str) -> bool:
    """Tells whether a start is a run's folder, or should be; a name that is no folder may be one of the Hub's."""
    return os.path.isdir(directory) and not is_huggingface_directory(directory)


def find_start(directory: str) -> Start:
    """Returns what lies in a folder now: of a run, the newest checkpoint that verifies."""
    directory = os.path.abspath(os.path.expanduser(directory))
    return Start(directory, int(os.path.basename(find_checkpoint(directory))) if is_workdir(directory) else None)


def remember_start(workdir: str, start: Start) -> None:
    """Writes what a run has started from into its folder, with a digest of it."""
    content = start._asdict() | {"sha256": _digest(start)}
    write_atomically(os.path.join(workdir, _START), json.dumps(content, indent=1) + "\n")


def find_known_start(workdir: str) -> Start:
    """Returns what a run under tuning has started from; UserError where that is not there any more, or not the same."""
    path = os.path.join(workdir, _START)
    known = read_object(path) if os.path.exists(path) else {}
    directory, step = known.get("directory"), known.get("step")
    if not isinstance(directory, str) or not isinstance(step, (int, type(None))):
        raise UserError(f"{workdir} is a run under config.tuning, and no {_START} there says what it has started from")
    which = directory if step is None else f"step {step} of {directory}"
    needed = f"{workdir} stores what its tuning has trained, and needs the rest from {which}"
    try:
        digest = _digest(Start(directory, step))
    except (UserError, OSError) as e:
        raise UserError(f"{needed}, which cannot be read: put it back ({e})") from e
    if digest != known.get("sha256"):
        raise UserError(f"{needed}, which is not what it was when the run started: put that back")
    return Start(directory, step)


def _digest(start: Start) -> str:
    """Returns the SHA-256 of the files of a start: of a checkpoint, which is compared with it, its manifest."""
    digest = hashlib.sha256()
    if start.step is not None:
        names = [os.path.join(find_checkpoint(start.directory, start.step), MANIFEST)]
        if _tuning_of(start.directory) is not None:
            digest.update(_digest(find_known_start(start.directory)).encode())
    else:
        found = sorted(name for name in os.listdir(start.directory) if name.endswith(".safetensors"))
        names = [os.path.join(start.directory, name) for name in ("config.json", *found)]
    for name in names:
        with open(name, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()


def lacking_in_start(directory: str, model: ModelConfig, fresh_heads: bool) -> list[str]:
    """Names the parameters of heads that a start lacks; no number of it is read.

    Raises:
      UserError: it is not there, or of another model.
    """
    if not is_workdir(directory):
        return weights.open_start(directory, model, fresh_heads).lacking
    steps = os.path.join(directory, "checkpoints")
    if not (os.path.isdir(steps) and list_steps(steps)):
        raise UserError(
            f"config.checkpoint.init_from={directory} holds no checkpoint, and no config.json of a "
            "Hugging Face model: give the --workdir of a run that has saved one, or a Hugging Face directory"
        )
    heads = head_modules(model) if fresh_heads else set()
    wanted = models.abstract_params(model)
    if _tuning_of(directory) is not None:
        own = models.abstract_params(config.load(os.path.join(directory, "config.json")).model)
        return _lacking(directory, own, wanted, heads)
    return lacking_parameters(os.path.join(steps, str(max(list_steps(steps)))), wanted, heads)


def load_start(start: Start, model: ModelConfig, abstract: PyTree, fresh: Optional[Fresh] = None) -> Params:
    """Reads the parameters of a plain model that a run starts from, each device its own shards.

    Args:
      abstract: jax.ShapeDtypeStructs with shardings.
      fresh: gives the parameters of heads that the start lacks; None: it must have them all.
    """
    directory, heads = start.directory, head_modules(model)
    if not is_workdir(directory):
        return weights.load_params(directory, model, abstract, fresh)
    if _tuning_of(directory) is None:
        return load_params(directory, abstract, fresh, heads, start.step)
    experiment = config.load(os.path.join(directory, "config.json"))
    if not cast(adapt.Tuning, experiment.tuning).is_mergeable:
        raise UserError(
            f"{directory} is a run with {experiment.tuning}, of which there is no plain model: start from "
            f"{experiment.checkpoint.init_from}"
        )
    mesh = jax.tree.leaves(abstract)[0].sharding.mesh
    found = load_tuned(directory, experiment, (find_checkpoint(directory, start.step),), mesh)
    lacking = _lacking(directory, found, abstract, heads if fresh else set())
    drawn = flat(found) | (fresh(lacking) if fresh and lacking else {})
    return nested({path: drawn[path] for path in parameter_names(abstract)})


def load_tuned(
    workdir: str, experiment: Experiment, steps: Sequence[str], mesh: jax.sharding.Mesh, folder: str = TRAINED
) -> Params:
    """Returns the parameters of a run under tuning, those that it trained merged into those that it started from.

    Where they cannot be merged, those that were added are beside the others.

    Args:
      steps, folder: as `checkpoints.params.load_steps` has them.
    """
    whole = models.abstract_params(experiment.model)
    whole = with_shardings(whole, tree_shardings(mesh, whole))
    model = cast(adapt.Adapted, adapt.adapted(models.build(experiment.model, Compute()), experiment))
    trained = jax.eval_shape(lambda params: model.start(params, jax.random.key(0)), whole)
    trained = load_steps(steps, with_shardings(trained, tree_shardings(mesh, trained)), folder)
    places = {path: x.sharding for path, x in flat(whole).items()}
    nothing = lambda paths: {p: jnp.zeros(flat(whole)[p].shape, device=places[p]) for p in paths}  # noqa: E731
    fresh = nothing if experiment.checkpoint.fresh_heads else None  # heads are trained then
    frozen = model.frozen(load_start(find_known_start(workdir), experiment.model, whole, fresh))
    return model.merged(trained, frozen)[1]


def _tuning_of(workdir: str) -> Optional[config.kinds.Tuning]:
    path = os.path.join(workdir, "config.json")
    return config.load(path).tuning if os.path.exists(path) else None  # checkpoints alone are those of a plain model


def _lacking(directory: str, own: PyTree, wanted: PyTree, heads: set[str]) -> list[str]:
    """Names the parameters of `heads` that are not among a tuned run's own; UserError for others, or other shapes."""
    theirs = {path: x.shape for path, x in flat(own).items()}
    ours = {path: x.shape for path, x in flat(wanted).items()}
    lacking = [path for path in ours if path not in theirs and path.partition("/")[0] in heads]
    wrong = [path for path, shape in ours.items() if path not in lacking and theirs.get(path) != shape]
    if wrong:
        raise UserError(
            f"config.checkpoint.init_from={directory} is a run of another model: {', '.join(wrong)} are not there, or "
            "of another shape"
        )
    return lacking
