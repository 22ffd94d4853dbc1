"""The configuration of a run: a tree of plain dataclasses."""

import dataclasses
import importlib
from typing import TYPE_CHECKING, Annotated, Literal, Optional

from pretrainax.config.choice import free, later
from pretrainax.config.model import ModelConfig
from pretrainax.config.phases import Phase

if TYPE_CHECKING:  # with their methods
    from pretrainax.adapt import Tuning
    from pretrainax.config.kinds import Wrapper
    from pretrainax.data.objectives import Objective
    from pretrainax.data.packing import Packing
    from pretrainax.data.preparation.filters import NearDuplicates, QualityFilter
    from pretrainax.data.sources import Source
    from pretrainax.distill import Distillation as DistillConfig
    from pretrainax.interop.adaptations import Adaptation
    from pretrainax.optim import Optimizer, Schedule
    from pretrainax.tokenization import TokenizerConfig
    from pretrainax.trackers import Tracker
    from pretrainax.training.callbacks import Callback
else:  # their bases, which need neither JAX nor NumPy
    from pretrainax.config.kinds import (
        Adaptation,
        Callback,
        DistillConfig,
        NearDuplicates,
        Objective,
        Optimizer,
        Packing,
        QualityFilter,
        Schedule,
        Source,
        TokenizerConfig,
        Tracker,
        Tuning,
        Wrapper,
    )

Remat = Literal["none", "dots", "block"]  # the fastest first, the smallest last
PipelineSchedule = Literal["gpipe", "1f1b"]  # likewise
KeptSteps = Annotated[tuple[int, ...], "log"]


@dataclasses.dataclass
class DataConfig:
    """The text of a run, and how it becomes rows of tokens."""

    source: Source  # where documents come from
    sequence_length: int = 512  # tokens of an example's input (encoder input for an encoder-decoder)
    packing: Optional[Packing] = None  # Windows | FirstFit | BestFit | OneEach; None: what fits the objective
    drop_duplicates: bool = False  # drop documents that are equal to an earlier one of their split
    near_duplicates: Optional[NearDuplicates] = None  # drop documents that are nearly equal to an earlier one
    quality: Optional[QualityFilter] = None  # drop documents that are no good text
    # loader processes; 0: a thread of the training process, one batch ahead; None: as many as keep up with a GPU or TPU
    workers: Optional[int] = free(None)
    cache_dir: str = free("~/.cache/pretrainax")  # tokenizers and token shards, by fingerprint
    # of a cache_dir in an object store: bytes of token shards that each machine keeps; it reads others there, by range
    keep_bytes: int = free(100_000_000_000)
    prepare_workers: int = free(0)  # processes that tokenize; 0: one a core


@dataclasses.dataclass
class MeshConfig:
    """Devices along each axis; one axis may be -1: all that are left."""

    data: int = free(-1)  # batch split, parameters copied
    pipeline: int = free(1)  # layers split: a stage has some, and hands the stream on; around them the batch is split
    fsdp: int = free(1)  # batch split, parameters split too
    expert: int = free(1)  # batch split, experts split: each device has some, and sends the others their tokens
    sequence: int = free(1)  # length split
    tensor: int = free(1)  # heads, feed-forward and vocabulary split
    slices: int = free(1)  # TPU slices, or clusters of GPUs, that a slow network joins: only `data` crosses it


@dataclasses.dataclass
class TrainConfig:
    """Says how long a run trains, on batches of which size, in which numbers, and what it does after a fault."""

    steps: int = 1000  # updates in all
    global_batch_size: int = 32  # examples of one update, over all devices and micro-batches
    accumulate: int = 1  # micro-batches of one update
    seed: int = 0  # of parameters, data order, dropout and masks; the next four set one of them apart
    init_seed: Optional[int] = None  # of fresh parameters; None: seed
    order_seed: Optional[int] = None  # of the order of the data; None: seed
    dropout_seed: Optional[int] = None  # of dropout; None: seed
    mask_seed: Optional[int] = None  # of all that objectives draw: masks, spans, pairs, replacements; None: seed
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of activations; auto: bfloat16 on TPU and GPU
    z_loss: float = 0.0  # weight of log(Z)^2 (PaLM: 1e-4)
    # memory of an exponential moving average of the parameters, which is kept beside them; None: none is kept
    ema_decay: Optional[float] = None
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
    # first and last step of which a profile is written to WORKDIR/profiles, as 10:13; "": none (docs/profiling.md)
    profile_steps: str = free("")
    # seconds without a step or a batch of a validation, after the first step, after which a process ends with exit code
    # 1, for the scheduler to start the run again; 0: never. Writing a checkpoint counts as well
    stuck_after: float = free(3600.0)
    # a GPU too computes the same bits again, also after a restart on GPUs of the same kind (launch/README.md)
    deterministic: bool = free(False)
    # auto: the fastest that fits
    attention: Literal["auto", "xla", "cudnn", "tpu_flash", "tpu_splash"] = free("auto")
    # kept for the backward: none: products, kernels' results | dots: products | block: inputs | auto: the first of
    # these that fits the devices, by the estimate
    remat: Literal["auto", Remat] = free("none")
    # parts of the rows that pass through the stages of mesh.pipeline one after the other; 0: as many as there are rows
    pipeline_parts: int = free(0)
    # 1f1b: a part goes back as soon as it is through, so that a stage keeps few at a time | gpipe: after all of them
    pipeline_schedule: PipelineSchedule = free("gpipe")
    scan_unroll: int = free(0)  # blocks in each turn of the scan over layers; 0: a GPU all of 24, a CPU 4, a TPU 1
    loss_chunk: int = free(0)  # tokens of a device whose logits exist at a time; 0: 4,096, on a CPU 1,024

    @property
    def layer_forwards(self) -> int:
        """Returns the number of forward passes of a layer per step; remat "block" recomputes one."""
        return 2 if self.remat == "block" else 1

    @property
    def logged_every(self) -> int:
        """Returns `log_every`, or what stands for its 0: curves of any length have enough points."""
        return self.log_every or min(max(self.steps // 50, 1), 50)

    @property
    def profiled(self) -> range:
        """Returns the steps of `profile_steps`, counted as in metrics.jsonl; ValueError where it is no such text."""
        if not self.profile_steps:
            return range(0)
        first, last = map(int, self.profile_steps.split(":"))
        return range(first, last + 1)

    def seed_of(self, use: Literal["init", "order", "dropout", "mask"]) -> int:
        """Returns the seed of one use: its own, or that of all."""
        own = getattr(self, f"{use}_seed")
        return self.seed if own is None else own


@dataclasses.dataclass
class LayersConfig:
    """Says which layers are trained, how fast and from when on: for a model that has been trained before.

    No layer is above the heads and the last norm. Below them are the blocks of each stack, the last one first, and
    below these the embeddings, with all else that the blocks share. ALBERT's blocks are one layer.
    """

    # a layer's rate is the schedule's, times this to the power of the layers above it (ELECTRA: 0.8; ULMFiT: 1 / 2.6)
    rate_decay: float = 1.0
    frozen_embeddings: bool = False  # embeddings, and all else that the blocks share, stay as they are
    frozen: int = 0  # blocks of each stack, from the first, that stay as they are
    # steps after which the next layer is trained too, from above (ULMFiT: those of an epoch); 0: all are from the start
    unfreeze_every: int = 0
    unfreeze_warmup: int = 0  # steps in which the rate of such a layer rises to its own

    def last_start(self, model: ModelConfig) -> int:
        """Returns how many steps are made before all is trained that is not frozen."""
        blocks = max(model.stack_blocks)
        return self.unfreeze_every * (blocks - self.frozen if self.frozen_embeddings else blocks + 1)

    def describe(self) -> str:
        """Returns what is not as by default, for people; "" where all layers are trained alike."""
        blocks = "the first block" if self.frozen == 1 else f"the first {self.frozen} blocks"
        frozen = ["the embeddings"] * self.frozen_embeddings + [blocks] * bool(self.frozen)
        said = [f"rate · {self.rate_decay:g}^(layers above)"] * (self.rate_decay != 1.0)
        said += [f"{' and '.join(frozen)} frozen"] * bool(frozen)
        rises = f", each over {self.unfreeze_warmup:,} steps" * bool(self.unfreeze_warmup)
        said += [f"one more from above every {self.unfreeze_every:,} steps{rises}"] * bool(self.unfreeze_every)
        return "; ".join(said)


@dataclasses.dataclass
class EvaluateConfig:
    """Says when a run is measured, and on how much of the validation text."""

    every: int = free(500)  # steps
    parameters: Literal["trained", "ema"] = (
        "trained"  # what is validated, and kept as the best; ema: the moving average
    )
    batches: int = free(20)  # of the validation split, always the same ones; 0: all
    average: int = free(
        0
    )  # the mean of so many last checkpoints is validated too, at the end (Transformer: 5); 0: none
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
    # steps that are saved and kept for good, beside these; log: 0, 1, 2, 4, 8, …, to study what is learned when
    keep_at: KeptSteps = free(())
    # where --workdir is of an object store: the folder of each machine that has its newest files; None: a cache
    local_dir: Optional[str] = free(None)
    # parameters to start from: a run, RUN@2000, RUN@best, an export, a Hugging Face directory, hf:org/name[@revision]
    init_from: Optional[str] = None
    # how that becomes this model, one after the other, where it is of another family or shape; (): it is of this one
    adapt: tuple[Adaptation, ...] = ()
    fresh_heads: bool = False  # heads that `init_from` lacks are drawn anew (a BertModel has none): they are named

    def keeps(self, step: int) -> bool:
        """Returns True if the checkpoint after so many updates is kept for good."""
        return step & (step - 1) == 0 if self.keep_at == "log" else step in self.keep_at


def _default_trackers() -> tuple[Tracker, ...]:
    """Returns what shows a run where nothing is said; the classes need this module, so it knows one by its name."""
    return (importlib.import_module("pretrainax.trackers").TensorBoard(),)


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
    layers: LayersConfig = dataclasses.field(default_factory=LayersConfig)  # which are trained, and how fast
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)  # validation
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)  # what is saved
    tuning: Optional[Tuning] = None  # trains a few parameters of `checkpoint.init_from` alone; None: all are trained
    distill: Optional[DistillConfig] = None  # a teacher that the model learns from too; None: there is none
    phases: tuple[Phase, ...] = ()  # parts of the run with other lengths, batches, text, …; (): it is one
    # where the run is shown beside its metrics.jsonl, which is always written: (WandB(project='t5'), TensorBoard())
    trackers: tuple[Tracker, ...] = dataclasses.field(default_factory=_default_trackers, metadata={"free": True})

    # code that is called beside the steps, as entry points name it (docs/extending.md); (): none beside the usual
    callbacks: tuple[Callback, ...] = later(())

    @property
    def validation_objective(self) -> Objective:
        """Returns what validation asks of the model."""
        return self.objective if self.evaluate.objective is None else self.evaluate.objective

    @property
    def draws_heads(self) -> bool:
        """Returns True if heads that `checkpoint.init_from` lacks are drawn anew: those of a task always are."""
        return self.checkpoint.fresh_heads or self.model.head is not None

    @property
    def rows_per_update(self) -> float:
        """Counts the examples whose gradient an update takes, some of them more than once."""
        return self.train.global_batch_size * self.optimizer.gradients_per_update

    @property
    def wrapper(self) -> Optional[Wrapper]:
        """Returns the field that wraps the model in training; None: it is trained as it is."""
        return self.tuning if self.distill is None else self.distill

    @property
    def passes(self) -> int:
        """Counts the products of a step with each matrix: forward, and two backward where it is trained."""
        return 3 if self.tuning is None else self.tuning.passes

    @property
    def select_by(self) -> str:
        """Names the figure of a validation that the best checkpoint, patience and a fit go by."""
        return self.evaluate.select_by or self.validation_objective.select_by
