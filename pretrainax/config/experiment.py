"""Defines a run's config (`Experiment`) as a tree of plain dataclasses."""

import dataclasses
import importlib
from typing import TYPE_CHECKING, Annotated, Literal, Optional

from pretrainax.config.choice import optional_in_json, resumable_field
from pretrainax.config.metric import SELECTION_HALF
from pretrainax.config.model import ModelConfig
from pretrainax.config.phases import Phase
from pretrainax.config.transfer import Transfer
from pretrainax.files.errors import counted

if TYPE_CHECKING:  # the implementations
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
else:  # base classes, which import neither JAX nor NumPy
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

Remat = Literal["none", "dots", "block"]  # from the fastest to the most memory-efficient
PipelineSchedule = Literal["gpipe", "1f1b"]  # from the fastest to the most memory-efficient
SeedUse = Literal["init", "order", "dropout", "mask"]
PermanentSteps = Annotated[tuple[int, ...], "log"]


@dataclasses.dataclass
class DataConfig:
    """Config of the dataset of a run, and of its conversion to rows of tokens."""

    source: Source  # source of the documents
    sequence_length: int = 512  # input tokens of an example (encoder input for an encoder-decoder)
    # Windows | FirstFit | BestFit | OneEach; None: the packing that fits the objective
    packing: Optional[Packing] = None
    drop_duplicates: bool = False  # drops documents that equal an earlier document of their split
    near_duplicates: Optional[NearDuplicates] = None  # drops near-duplicates of earlier documents
    quality: Optional[QualityFilter] = None  # drops low-quality documents
    # loader processes; 0: a thread of the training process, one batch ahead; None: enough to keep up with a GPU or TPU
    workers: Optional[int] = resumable_field(None)
    cache_dir: str = resumable_field("~/.cache/pretrainax")  # tokenizers and token shards, keyed by fingerprint
    # bytes of token shards that each machine stores locally if cache_dir is in an object store; it reads other shards
    # remotely, by byte range
    keep_bytes: int = resumable_field(100_000_000_000)
    prepare_workers: int = resumable_field(0)  # tokenizer processes; 0: one per core


@dataclasses.dataclass
class MeshConfig:
    """Number of devices along each mesh axis; one axis may be -1, which means all remaining devices."""

    data: int = resumable_field(-1)  # data parallelism: splits the batch, replicates parameters
    # pipeline parallelism: splits the layers into stages, and the batch outside the layers
    pipeline: int = resumable_field(1)
    fsdp: int = resumable_field(1)  # fully sharded data parallelism: splits the batch and the parameters
    expert: int = resumable_field(1)  # expert parallelism: splits the batch, experts and, with fsdp, other parameters
    sequence: int = resumable_field(1)  # sequence parallelism: splits the length
    tensor: int = resumable_field(1)  # tensor parallelism: splits heads, feed-forward and vocabulary
    slices: int = resumable_field(1)  # TPU slices or GPU clusters that a slow network connects; only `data` crosses it


@dataclasses.dataclass
class TrainConfig:
    """Config of training: length, batch size, seeds, numerics, fault handling and performance options."""

    steps: int = 1000  # total number of updates; 0: they follow from `budget`
    # length of the run, which determines `steps` and, if they are 0 or auto, evaluate.every, checkpoint.every and
    # schedule.warmup_steps: "3 epochs", "1e15 flops", or "20 min" of updates, whose speed the run measures before it
    # begins; None: 3 epochs for fine-tuning with steps 0
    budget: Optional[str] = optional_in_json(None)
    global_batch_size: int = 32  # examples per update, over all devices and microbatches
    accumulate: int = 1  # microbatches per update
    seed: int = 0  # seed of parameters, data order, dropout and masks; the next four fields override it for one of them
    init_seed: Optional[int] = None  # seed of fresh parameters; None: seed
    order_seed: Optional[int] = None  # seed of the data order; None: seed
    dropout_seed: Optional[int] = None  # seed of dropout; None: seed
    # seed of random choices in objectives: masks, spans, pairs, replacements; None: seed
    mask_seed: Optional[int] = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # dtype of activations; auto: bfloat16 on TPU and GPU
    # operands of the linear layers in blocks and of experts, forward and backward: fp8 (H100, B200, TPU7x) | int8
    # (other TPUs, A100, H100, B200); "": dtype. Attention, routers and embeddings use dtype
    products: Literal["", "fp8", "int8"] = ""
    # True: the loss over the vocabulary has 8-bit operands too, in the format of products. Its effect on the loss was
    # measured with one seed only (benchmarks/lab_book.md)
    products_in_head: bool = False
    z_loss: float = 0.0  # weight of log(Z)^2 (PaLM: 1e-4)
    # decay of an exponential moving average of the parameters, stored in addition to them; None: no average
    ema_decay: Optional[float] = None
    # probability that label smoothing distributes over all other tokens (Transformer: 0.1)
    label_smoothing: float = 0.0
    # action at a non-finite loss or gradient; skip: skips the update and counts it
    on_nonfinite: Literal["stop", "skip"] = resumable_field("stop")
    # action at a loss spike; rollback: returns to an earlier checkpoint, also where on_nonfinite would stop
    on_spike: Literal["ignore", "stop", "rollback"] = resumable_field("ignore")
    # a spike is a loss or log gradient norm this many robust deviations above the median ...
    spike_deviations: float = resumable_field(6.0)
    spike_steps: int = resumable_field(3)  # ... for this many consecutive steps
    spike_window: int = resumable_field(128)  # number of previous steps for the median and deviation
    rollback_steps: int = resumable_field(100)  # a rollback returns to this many steps before the spike ...
    rollback_skip: int = resumable_field(200)  # ... and skips this many batches
    max_rollbacks: int = resumable_field(20)  # maximum number of rollbacks; after one more spike, the run fails
    log_every: int = resumable_field(0)  # steps between log lines; 0: at least 50 lines per run, and one every 50 steps
    # first and last step of a profile in WORKDIR/profiles, for example 10:13; "": no profile (docs/how-to/profile.md)
    profile_steps: str = resumable_field("")
    # seconds without a step, a batch of a validation or a stage of a checkpoint's save after which a process exits with
    # code 1, so that the scheduler can restart the run; applies after the first step. 0: no limit
    stuck_after: float = resumable_field(3600.0)
    # makes GPU runs bitwise reproducible, also after a restart on GPUs of the same kind (launch/README.md)
    deterministic: bool = resumable_field(False)
    # attention kernel; auto: the fastest that supports the model
    attention: Literal["auto", "xla", "cudnn", "tiled", "tpu_flash", "tpu_splash"] = resumable_field("auto")
    # activations saved for the backward pass: none: outputs of matrix multiplications and kernels | dots: outputs of
    # matrix multiplications | block: inputs of blocks | auto: the first of these whose estimated memory fits
    remat: Literal["auto", Remat] = resumable_field("none")
    # microbatches that pass through the stages of mesh.pipeline; 0: one per row
    pipeline_microbatches: int = resumable_field(0)
    # 1f1b: each microbatch runs backward right after its forward pass, so a stage stores few at a time | gpipe:
    # backward starts after all forward passes
    pipeline_schedule: PipelineSchedule = resumable_field("gpipe")
    # blocks per iteration of the scan over layers; 0: on GPU all of up to 24, on CPU 4, on TPU 1
    scan_unroll: int = resumable_field(0)
    # tokens per device whose logits are in memory at a time; 0: 4,096, on GPU 8,192 if
    # their logits take at most 2 GiB, on CPU 1,024
    loss_chunk: int = resumable_field(0)

    @property
    def head_products(self) -> str:
        """Returns the format of the operands of the loss over the vocabulary: `products`, or "" for `dtype`."""
        return self.products if self.products_in_head else ""

    @property
    def layer_forwards(self) -> int:
        """Returns the number of forward passes of each layer per step: 2 with remat "block", otherwise 1."""
        return 2 if self.remat == "block" else 1

    @property
    def logged_every(self) -> int:
        """Returns the number of steps between log lines: `log_every` or, if that is 0, `steps` / 50 (from 1 to 50)."""
        return self.log_every or min(max(self.steps // 50, 1), 50)

    @property
    def profiled(self) -> range:
        """Returns the steps to profile, numbered as in metrics.jsonl; the range is empty if `profile_steps` is "".

        Raises:
          ValueError: `profile_steps` is malformed.
        """
        if not self.profile_steps:
            return range(0)
        first, last = map(int, self.profile_steps.split(":"))
        return range(first, last + 1)

    def seed_of(self, use: SeedUse) -> int:
        """Returns the seed for one use of randomness: the field `{use}_seed`, or `seed` if that field is None."""
        override = getattr(self, f"{use}_seed")
        return self.seed if override is None else override


@dataclasses.dataclass
class LayersConfig:
    """Config of layer-wise learning rates, freezing and gradual unfreezing, for fine-tuning.

    The top layer contains the heads and the last norm. Below the top layer are the blocks of each stack, from last to
    first. The lowest layer contains the embeddings and all other parameters that the blocks share. ALBERT's blocks,
    which share their parameters, form one layer.
    """

    # the learning rate of a layer is the rate of the schedule times rate_decay ** (number of layers above the layer)
    # (ELECTRA: 0.8; ULMFiT: 1 / 2.6)
    rate_decay: float = 1.0
    frozen_embeddings: bool = False  # freezes the embeddings and all other parameters that the blocks share
    frozen: int = 0  # frozen blocks of each stack, from the first
    # steps between unfreezing one more layer, from the top (ULMFiT: one epoch); 0: trains all layers from the start
    unfreeze_every: int = 0
    unfreeze_warmup: int = 0  # warmup steps of an unfrozen layer's learning rate

    def last_start(self, model: ModelConfig) -> int:
        """Returns the step at which gradual unfreezing starts to train the last of the layers that are not frozen."""
        blocks = max(model.stack_blocks)
        return self.unfreeze_every * (blocks - self.frozen if self.frozen_embeddings else blocks + 1)

    def describe(self) -> str:
        """Describes the non-default settings; returns "" if all layers train with the same learning rate."""
        blocks = "the first block" if self.frozen == 1 else f"the first {self.frozen} blocks"
        frozen = ["the embeddings"] * self.frozen_embeddings + [blocks] * bool(self.frozen)
        settings = [f"rate · {self.rate_decay:g}^(layers above)"] * (self.rate_decay != 1.0)
        settings += [f"{' and '.join(frozen)} frozen"] * bool(frozen)
        warmup = f", each with a warmup of {counted(self.unfreeze_warmup, 'step')}" * bool(self.unfreeze_warmup)
        every = counted(self.unfreeze_every, "step")
        settings += [f"unfreezes a layer every {every}{warmup}"] * bool(self.unfreeze_every)
        return "; ".join(settings)


@dataclasses.dataclass
class EvaluateConfig:
    """Config of validation: frequency, data, parameters and metric."""

    # steps between validations; 0: one epoch, or a tenth of the steps if `train.budget` is in FLOPs or time
    every: int = resumable_field(500)
    # parameters to validate and to save as the best checkpoint; ema: the moving average
    parameters: Literal["trained", "ema"] = "trained"
    # batches of the validation split, the same in every validation; 0: all batches of the split. They contain several
    # sources or objectives in proportion to the weights: a validation may repeat rows of one, and omit rows of another
    batches: int = resumable_field(20)
    # number of last checkpoints whose mean parameters the run validates at its end (Transformer: 5); 0: no average
    average: int = resumable_field(0)
    # metric for the best checkpoint, `patience` and `plan --fit`, e.g. "accuracy"; "": the metric of the objective
    select_by: str = resumable_field("")
    # computes the metrics also on each half of the validation rows: loss/half=1 selects checkpoints, and loss/half=2 is
    # the value to report. --sweep sets it
    halves: bool = optional_in_json(False)
    # stops after this many validations without an improvement of the metric; None: never stops
    patience: Optional[int] = resumable_field(None)
    objective: Optional[Objective] = None  # objective of the validation; None: `config.objective`
    # tasks to score at each validation, by name or description file as in `evaluate --tasks`: ("grammar",); (): none
    tasks: tuple[str, ...] = optional_in_json(())
    task_examples: int = optional_in_json(200)  # maximum number of examples of each task, evenly spaced; 0: all
    # shows samples after each validation; False: only at the end of the run
    samples: bool = optional_in_json(False)
    # prompts for the samples. The model continues a prompt, or fills in [MASK] or <extra_id_0>.
    # (): the samples are predictions in validation examples
    prompts: tuple[str, ...] = resumable_field(())


@dataclasses.dataclass
class CheckpointConfig:
    """Config of checkpoints: when to save them, which of them to keep, and the initial parameters of the run."""

    # steps between checkpoints; 0: one epoch, or a tenth of the steps if `train.budget` is in FLOPs or time. The run
    # also saves at the end and on SIGTERM
    every: int = resumable_field(500)
    keep: int = resumable_field(2)  # number of newest checkpoints to keep, in addition to the best
    # additional steps whose checkpoints are permanent; log: 0, 1, 2, 4, 8, …, to study training dynamics
    keep_at: PermanentSteps = resumable_field(())
    # base folder of the local copy of the run on each machine, if --workdir is in an object store; None: the cache
    # folder of the user
    local_dir: Optional[str] = resumable_field(None)
    # source of the initial parameters: a run, RUN@2000, RUN@best, an export, a Hugging Face directory, or
    # hf:org/name[@revision]; None: the parameters are initialized randomly
    init_from: Optional[str] = None
    adapt: tuple[Adaptation, ...] = ()  # adaptations, in order, for an init_from with another family or shape; (): none
    fresh_heads: bool = False  # initializes heads that `init_from` lacks (a BertModel has none) and logs their names

    def keeps(self, step: int) -> bool:
        """Returns True if the checkpoint after `step` updates is permanent, according to `keep_at`."""
        return step & (step - 1) == 0 if self.keep_at == "log" else step in self.keep_at


def _default_trackers() -> tuple[Tracker, ...]:
    """Returns the default trackers: TensorBoard.

    The trackers module is imported inside this function, because it imports this module.
    """
    return (importlib.import_module("pretrainax.trackers").TensorBoard(),)


@dataclasses.dataclass
class Experiment:
    """The config of a run: model, data, objective, optimization and devices."""

    model: ModelConfig  # the architecture
    tokenizer: TokenizerConfig  # tokenizer, with a vocabulary trained on the documents or loaded
    data: DataConfig  # dataset and packing
    objective: Objective  # training objective
    optimizer: Optimizer  # optimizer
    schedule: Schedule  # learning-rate schedule
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)  # parallelism over devices
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)  # steps, batches, numerics, faults
    layers: LayersConfig = dataclasses.field(default_factory=LayersConfig)  # layer-wise learning rates
    # transfer of hyperparameters from a small base model: Transfer(base_width=256); None: the values are for this model
    transfer: Optional[Transfer] = optional_in_json(None, is_free=False)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)  # validation
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)  # checkpoints
    # parameter-efficient tuning of the model of `checkpoint.init_from`: trains few parameters and freezes the others;
    # None: trains all parameters
    tuning: Optional[Tuning] = None
    distill: Optional[DistillConfig] = None  # teacher for distillation; None: no teacher
    # phases of the run with different sequence lengths, batch sizes, datasets, …; (): one phase with this config
    phases: tuple[Phase, ...] = ()
    # experiment trackers, in addition to metrics.jsonl: (WandB(project='t5'), TensorBoard())
    trackers: tuple[Tracker, ...] = dataclasses.field(default_factory=_default_trackers, metadata={"free": True})

    # additional callbacks, by entry point name (docs/how-to/own-code.md)
    callbacks: tuple[Callback, ...] = optional_in_json(())

    @property
    def validation_objective(self) -> Objective:
        """Returns the validation objective: `evaluate.objective`, or `objective` if that is None."""
        return self.objective if self.evaluate.objective is None else self.evaluate.objective

    @property
    def initializes_missing_heads(self) -> bool:
        """Returns True if the run initializes heads that `checkpoint.init_from` lacks, instead of raising an error.

        This is the case if the model has a task head or `checkpoint.fresh_heads` is set.
        """
        return self.checkpoint.fresh_heads or self.model.head is not None

    @property
    def rows_per_update(self) -> float:
        """Returns the cost of an update's gradients in rows: the batch size times `optimizer.gradients_per_update`."""
        return self.train.global_batch_size * self.optimizer.gradients_per_update

    @property
    def wrapper(self) -> Optional[Wrapper]:
        """Returns the config that wraps the model during training: `distill` or `tuning`, or None if neither is set."""
        return self.tuning if self.distill is None else self.distill

    @property
    def passes(self) -> int:
        """Returns the number of matmuls with each weight matrix per step.

        A trained matrix has three: one in the forward pass and two in the backward pass. With `tuning`,
        returns `tuning.passes`, the number for a frozen matrix.
        """
        return 3 if self.tuning is None else self.tuning.passes

    @property
    def select_by(self) -> str:
        """Returns the name of the validation metric used for the best checkpoint, patience and `plan --fit`."""
        return f"{self._selection_metric}{SELECTION_HALF}" if self.evaluate.halves else self._selection_metric

    @property
    def _selection_metric(self) -> str:
        of_distillation = "" if self.distill is None else self.distill.select_by
        return self.evaluate.select_by or of_distillation or self.validation_objective.select_by

    @property
    def has_halves(self) -> bool:
        """Checks whether `evaluate.halves` has two values of the metric that selects checkpoints."""
        return self.evaluate.batches != 1 and self.validation_objective.has_halves(self._selection_metric)
