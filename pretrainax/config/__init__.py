"""The configuration of a run: a tree of plain dataclasses.

`configs/x.py` has `get_config(variant: str = "") -> Experiment`; flags override single fields
(`--config.train.steps=100`). Where a field offers alternatives (which objective, which optimizer), its value is a
`Choice`: an object of the class that does the work, with its own fields. Defaults live here and nowhere else.
Overrides come after construction, so derived values are properties and `validation.validate` runs after them.

Importing this module imports neither JAX nor NumPy: data loader workers load it.
"""

from pretrainax.config.auto import AUTO, resolve_auto
from pretrainax.config.choice import Choice
from pretrainax.config.experiment import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Experiment,
    LayersConfig,
    MeshConfig,
    TrainConfig,
)
from pretrainax.config.experts import MixtureOfExperts
from pretrainax.config.heads import Classify, Embed, Extract, HeadConfig, Tag
from pretrainax.config.latent_attention import LatentAttention
from pretrainax.config.model import DecoderSizes, Generator, ModelConfig
from pretrainax.config.multi_token import MultiTokenPrediction
from pretrainax.config.phases import Phase, RunPhase, naming, phase_at, phases_of, trained_as
from pretrainax.config.positions import (
    DisentangledPositions,
    LearnedPositions,
    LinearScaling,
    LongContextScaling,
    LongRopeScaling,
    NoPositions,
    Position,
    RelativePositionBuckets,
    RotaryPositions,
    RotaryScaling,
    SinusoidalPositions,
    YarnScaling,
)
from pretrainax.config.recurrent import NUM_CHARACTERS, WORD_LENGTH, Recurrent
from pretrainax.config.serialization import differences, dump, from_json, load, to_json
from pretrainax.config.sparse_attention import RandomBlocks, SlidingWindows, SparseAttention
from pretrainax.files.errors import RunFailed, UserError, nearest

__all__ = [
    "NUM_CHARACTERS",
    "WORD_LENGTH",
    "Recurrent",
    "AUTO",
    "CheckpointConfig",
    "Choice",
    "Classify",
    "DataConfig",
    "DecoderSizes",
    "DisentangledPositions",
    "Embed",
    "EvaluateConfig",
    "Experiment",
    "Extract",
    "Generator",
    "HeadConfig",
    "LatentAttention",
    "LayersConfig",
    "LearnedPositions",
    "LinearScaling",
    "LongContextScaling",
    "LongRopeScaling",
    "MeshConfig",
    "MixtureOfExperts",
    "ModelConfig",
    "MultiTokenPrediction",
    "NoPositions",
    "Phase",
    "Position",
    "RandomBlocks",
    "RelativePositionBuckets",
    "RotaryPositions",
    "RotaryScaling",
    "RunFailed",
    "RunPhase",
    "SinusoidalPositions",
    "SlidingWindows",
    "SparseAttention",
    "Tag",
    "TrainConfig",
    "UserError",
    "YarnScaling",
    "differences",
    "dump",
    "from_json",
    "load",
    "naming",
    "nearest",
    "phase_at",
    "phases_of",
    "resolve_auto",
    "to_json",
    "trained_as",
]
