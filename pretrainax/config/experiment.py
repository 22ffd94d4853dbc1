"""The configuration of a run: a tree of plain dataclasses."""

import dataclasses
from typing import TYPE_CHECKING, Literal, Optional

from pretrainax.config.choice import free
from pretrainax.config.model import ModelConfig

if TYPE_CHECKING:  # with their methods
    from pretrainax.data.objectives import Objective
    from pretrainax.data.packing import Packing
    from pretrainax.data.preparation.filters import NearDuplicates, QualityFilter
    from pretrainax.data.sources import Source
    from pretrainax.optim import Optimizer, Schedule
    from pretrainax.tokenization import TokenizerConfig
else:  # their bases, which need neither JAX nor NumPy
    from pretrainax.config.kinds import (
        NearDuplicates,
        Objective,
        Optimizer,
        Packing,
        QualityFilter,
        Schedule,
        Source,
        TokenizerConfig,
    )

Remat = Literal["none", "dots", "block"]  # the fastest first, the smallest last


@dataclasses.dataclass
class DataConfig:
    """The text of a run, and how it becomes rows of tokens."""

    source: Source  # where documents come from
    sequence_length: int = 512  # tokens of an example's input (encoder input for an encoder-decoder)
    packing: Optional[Packing] = None  # Windows | FirstFit | BestFit | OneEach; None: what fits the objective
    drop_duplicates: bool = False  # drop documents that are equal to an earlier one of their split
    near_duplicates: Optional[NearDuplicates] = None  # drop documents that are nearly equal to an earlier one
    quality: Optional[QualityFilter] = None  # drop documents that are no good text
    workers: int = free(0)  # loader processes; 0: in the training process, one batch ahead in a thread
    cache_dir: str = free("~/.cache/pretrainax")  # tokenizers and token shards, by fingerprint
    prepare_workers: int = free(0)  # processes that tokenize; 0: one a core


@dataclasses.dataclass
class MeshConfig:
    """Devices along each axis; one axis may be -1: all that are left."""

    data: int = free(-1)  # batch split, parameters copied
    fsdp: int = free(1)  # batch split, parameters split too
    sequence: int = free(1)  # length split
    tensor: int = free(1)  # heads, feed-forward and vocabulary split
    slices: int = free(1)  # TPU slices, or clusters of GPUs, that a slow network joins: only `data` crosses it


@dataclasses.dataclass
class TrainConfig:
    """Says how long a run trains, on batches of which size, in which numbers, and what it does after a fault."""

    steps: int = 1000  # updates in all
    global_batch_size: int = 32  # examples of one update, over all devices and micro-batches
    accumulate: int = 1  # micro-batches of one update
    seed: int = 0  # of parameters, dropout, data order and masks
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations; auto: bfloat16 on TPU and GPU
    z_loss: float = 0.0  # weight of log(Z)^2 (PaLM: 1e-4)
    label_smoothing: float = 0.0  # share of the probability that all other tokens are to have (Transformer: 0.1)
    on_nonfinite: Literal["stop", "skip"] = free("stop")  # at a loss or gradient not finite; skip that update, count it
    # rollback: the run goes back, also where on_nonfinite would stop it
    on_spike: Literal["ignore", "stop", "rollback"] = free("ignore")
    spike_deviations: float = free(6.0)  # loss or log gradient norm, so many robust deviations above the median ...
    spike_steps: int = free(3)  # ... for so many steps in a row is a spike
    spike_window: int = free(128)  # steps before those, of which median and deviation are
    rollback_steps: int = free(100)  # the run goes back to so many steps before the spike ...
    rollback_skip: int = free(200)  # ... and the next so many batches are left out
    max_rollbacks: int = free(20)  # one more, and the run fails
    log_every: int = free(0)  # steps; 0: at least 50 lines a run, and one every 50 steps
    # auto: the fastest that fits
    attention: Literal["auto", "xla", "cudnn", "tpu_flash", "tpu_splash"] = free("auto")
    remat: Remat = free("none")  # kept for the backward: none: all | dots: matrix products | block: block inputs
    scan_unroll: int = free(0)  # blocks in each turn of the scan over layers; 0: 1, and on a CPU, where loops cost, 4
    loss_chunk: int = free(0)  # tokens of a device whose logits exist at a time; 0: 4,096, on a CPU 1,024

    @property
    def logged_every(self) -> int:
        """Returns `log_every`, or what stands for its 0: curves of any length have enough points."""
        return self.log_every or min(max(self.steps // 50, 1), 50)


@dataclasses.dataclass
class EvaluateConfig:
    """Says when a run is measured, and on how much of the validation text."""

    every: int = free(500)  # steps
    batches: int = free(20)  # of the validation split, always the same ones; 0: all
    # what the best checkpoint, `patience` and `plan --fit` go by, as "accuracy"; "": the figure that the objective has
    select_by: str = free("")
    patience: Optional[int] = free(None)  # stop after this many evaluations without a new best figure
    objective: Optional[Objective] = None  # what validation asks, if not what is trained; None: `config.objective`
    # texts that the samples at the end go on with or, where they have a [MASK] or <extra_id_0>, fill in; (): validation
    prompts: tuple[str, ...] = free(())


@dataclasses.dataclass
class CheckpointConfig:
    """Says what a run saves, and what it starts from."""

    every: int = free(500)  # steps; also at the end and on SIGTERM
    keep: int = free(2)  # newest ones kept, beside the best
    init_from: Optional[str] = None  # parameters to start from: a PretrainAX workdir, or a Hugging Face directory
    fresh_heads: bool = False  # heads that `init_from` lacks are drawn anew (a BertModel has none): they are named


@dataclasses.dataclass
class Experiment:
    """A run: what is trained, on which text, how, and on which devices."""

    model: ModelConfig  # the architecture
    tokenizer: TokenizerConfig  # text to ids: a vocabulary that is learnt from the text, or one that is read
    data: DataConfig  # the text, and how it fills rows
    objective: Objective  # what the model is asked to predict
    optimizer: Optimizer  # an update from a gradient
    schedule: Schedule  # the learning rate of each step
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)  # how the devices share the work
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)  # steps, batches, numbers, faults
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)  # validation
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)  # what is saved

    @property
    def validation_objective(self) -> Objective:
        """Returns what validation asks of the model."""
        return self.objective if self.evaluate.objective is None else self.evaluate.objective

    @property
    def select_by(self) -> str:
        """Names the figure of a validation that the best checkpoint, patience and a fit go by."""
        return self.evaluate.select_by or self.validation_objective.select_by
