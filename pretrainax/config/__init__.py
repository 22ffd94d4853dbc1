"""Defines a run's configuration as a tree of plain dataclasses.

`configs/x.py` defines `get_config(variant: str = "") -> Experiment`. Flags override individual fields
(`--config.train.steps=100`). The value of a field with alternatives (the objective, the optimizer) is a `Choice`: an
instance of the class that implements the selected alternative, with the alternative's options as its fields. Flags
change fields after the config has been constructed, so derived values are properties, and `validation.validate` runs
last.

This package imports neither JAX nor NumPy, because data loader processes import it.
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
from pretrainax.config.phases import Phase, RunPhase, config_at_checkpoint, phase_at, phase_in_errors, phases_of
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
from pretrainax.config.serialization import differences, differing_fields, dump, from_json, load, to_json
from pretrainax.config.sparse_attention import RandomBlocks, SlidingWindows, SparseAttention
from pretrainax.config.transfer import Transfer, resized
from pretrainax.files.errors import Diverged, RunFailed, UserError, nearest

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
    "Diverged",
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
    "Transfer",
    "UserError",
    "YarnScaling",
    "differences",
    "differing_fields",
    "dump",
    "from_json",
    "load",
    "phase_in_errors",
    "nearest",
    "phase_at",
    "phases_of",
    "resized",
    "resolve_auto",
    "to_json",
    "config_at_checkpoint",
]
