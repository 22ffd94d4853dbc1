"""The configuration of a run: a tree of plain dataclasses."""

import ast
import dataclasses
import difflib
import importlib
import json
import types
import typing
from collections.abc import Iterator
from typing import Any, ClassVar, Optional


class UserError(Exception):
    """A mistake in the config or the input. Main prints it as one line, without a traceback, and exits with 2."""

    exit_code = 2


class RunFailed(UserError):
    """A run that cannot go on through no mistake in a field: one line too, and exit code 1."""

    exit_code = 1


def nearest(name: str, allowed: typing.Iterable[str]) -> str:
    """The end of an error line: what is allowed, nearest names first; `nearest("stpes", ["steps"])`."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(name, allowed, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"allowed: {', '.join(allowed) or 'nothing'}"


def free(default: Any) -> Any:
    """A field that may differ between a run and its resumption: no mathematics, or the answer to a fault."""
    return dataclasses.field(default=default, metadata={"free": True})


class Choice:
    """Base of the dataclasses that one field offers as alternatives. JSON names them by their class."""

    _classes: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Choice._classes[cls.__name__] = cls

    @staticmethod
    def named(name: str) -> type:
        """The choice of this class name; UserError with the nearest ones where there is none."""
        for module in "tokenization data.sources data.objectives data.packing data.preparation.filters optim".split():
            importlib.import_module(f"pretrainax.{module}")  # which registers its choices
        choices = {k: c for k, c in Choice._classes.items() if "__dataclass_fields__" in vars(c)}  # no abstract ones
        if name not in choices:
            raise UserError(f"unknown choice {name!r}, {nearest(name, choices)}")
        return choices[name]

    @staticmethod
    def parse(text: str) -> "Choice":
        """`"TextFiles(path='my/books', valid_fraction=0.05)"` as the object; what a flag gives for a whole field.

        Values are literals, choices and tuples of them. Nothing is evaluated.
        """
        try:
            return _choice(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, AttributeError):
            raise UserError(f"cannot read {text!r}; write Name or Name(field=value, ...)") from None

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        """One line for each thing that cannot work: value got, what is allowed, field to set."""
        yield from ()


def _choice(node: ast.expr) -> Choice:
    """Of a name or a call; SyntaxError, ValueError or AttributeError where it is neither."""
    name = node.func.id if isinstance(node, ast.Call) else node.id
    values = {k.arg: _value(k.value) for k in getattr(node, "keywords", ())}
    if getattr(node, "args", ()) or None in values:  # without a name, and **
        raise SyntaxError
    cls = Choice.named(name)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for field in values.keys() - fields:
        raise UserError(f"{name} has no field {field!r}, {nearest(field, fields)}")
    for field in fields.keys() - values:
        if fields[field].default is fields[field].default_factory is dataclasses.MISSING:
            raise UserError(f"{name} needs a value for {field!r}: write {name}({field}=...)")
    hints = typing.get_type_hints(cls)
    for field, value in values.items():
        if not _fits(value, hints[field]):
            kind = hints[field].__name__ if isinstance(hints[field], type) else hints[field]
            raise UserError(f"{name}.{field} is {value!r}, it must be of type {kind}")
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type of a field."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, kind) for kind in kinds)
    if origin is tuple:
        if kinds[-1] is ...:
            kinds = kinds[:1] * len(value) if isinstance(value, tuple) else ()
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _value(node: ast.expr) -> Any:
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(map(_value, node.elts))
    return _choice(node) if isinstance(node, (ast.Call, ast.Name)) else ast.literal_eval(node)


# --- model ---------------------------------------------------------------------------------------------------------


class Position(Choice):
    """How a model knows where a token stands. `max_length` is None where any length works."""

    max_length: ClassVar[Optional[int]] = None


@dataclasses.dataclass
class LearnedPositions(Position):
    """One trained vector a position (Devlin et al. 2018)."""

    max_length: int = 512  # positions there are
    offset: int = 0  # rows at the start of the table that no position uses (RoBERTa, BART: 2, in fairseq's way)


@dataclasses.dataclass
class SinusoidalPositions(Position):
    """Fixed sines and cosines (Vaswani et al. 2017, section 3.5)."""


class RotaryScaling(Choice):
    """How the frequencies of a trained context are stretched to a longer one."""


@dataclasses.dataclass
class LongContextScaling(RotaryScaling):
    """LLaMA 3.1's stretching of the low rotary frequencies (Grattafiori et al. 2024; the released `rope_scaling`)."""

    factor: float = 8.0  # how much longer the new context is
    low_frequency_factor: float = 1.0  # wavelengths above original_length / this are stretched in full
    high_frequency_factor: float = 4.0  # wavelengths below original_length / this are left alone
    original_length: int = 8192  # the context before stretching


@dataclasses.dataclass
class LinearScaling(RotaryScaling):
    """All frequencies divided by one number (Chen et al. 2023, arXiv 2306.15595; Gemma 3's global layers)."""

    factor: float = 8.0


@dataclasses.dataclass
class RotaryPositions(Position):
    """Rotation of queries and keys by an angle that grows with the position (Su et al. 2021)."""

    max_length: int = 2048  # the context the model is made for
    theta: float = 10_000.0  # base of the geometric sequence of wavelengths
    scaling: Optional[RotaryScaling] = None
    local_theta: Optional[float] = None  # of local layers, which are not scaled; None: as the others (Gemma 3: 10,000)


@dataclasses.dataclass
class RelativePositionBuckets(Position):
    """T5's bias on attention logits, one scalar a head and bucket of distance (Raffel et al. 2020, section 2.1)."""

    num_buckets: int = 32  # half of them for exact distances, half for logarithmic ranges
    max_distance: int = 128  # farther than this, all share the last bucket


@dataclasses.dataclass
class DisentangledPositions(Position):
    """Relative positions that contents attend to, and that attend to contents (He et al. 2020, section 3.1)."""

    num_buckets: int = 256  # of each direction; half of them for exact distances, half for logarithmic ranges
    max_distance: int = 512  # from here on, all share the last bucket
    max_length: int = 512  # the context the model is made for, and the absolute positions that a mask decoder knows


@dataclasses.dataclass
class Generator:
    """ELECTRA's generator: a masked LM that proposes replacements, built as the model but for these sizes."""

    num_layers: int = 12
    d_model: int = 256
    d_ff: int = 1024
    num_heads: int = 4
    share_embeddings: str = "all"  # all (ELECTRA) | gradient_disentangled: plus a trained difference (DeBERTa v3)
    loss_weight: float = 50.0  # of the discriminator's loss (Clark et al. 2020, section 2)


@dataclasses.dataclass
class ModelConfig:
    """An architecture. A field exists only where two published models differ in it. Presets: `pretrainax.zoo`."""

    family: str = "decoder"  # encoder | encoder_decoder | decoder
    vocab_size: int = 32_000  # rows of the embedding; may exceed the tokenizer's size (padding for the hardware)
    num_layers: int = 12  # blocks of each stack (an encoder-decoder has two stacks)
    num_decoder_layers: Optional[int] = None  # of an encoder-decoder's second stack; None: num_layers (ByT5: fewer)
    share_layers: bool = False  # one block, applied num_layers times (ALBERT)
    d_model: int = 768  # width of the residual stream
    d_ff: int = 3072  # width inside the feed-forward
    num_heads: int = 12
    num_kv_heads: Optional[int] = None  # fewer than num_heads: grouped-query attention; None: as many
    head_dim: Optional[int] = None  # None: d_model // num_heads
    embedding_dim: Optional[int] = None  # width of the embeddings, projected to d_model (ALBERT); None: d_model
    position: Position = dataclasses.field(default_factory=LearnedPositions)
    layer_pattern: tuple[str, ...] = ("global",)  # attention of each layer, repeated: "global" | "local" (Gemma 2)
    window: Optional[int] = None  # tokens a local layer sees: itself and those before it; an encoder, half on each side
    norm: str = "layer"  # layer | rms | rms_plus_one: the scale is 1 + the parameter (Gemma)
    norm_at: str = "pre"  # pre: x + f(norm(x)), a last norm on top | post: norm(x + f(x)) | both: x + norm(f(norm(x)))
    norm_epsilon: float = 1e-5
    norm_starts_stream: bool = False  # the first block's first norm is of the residual stream too (ModernBERT)
    qk_norm: bool = False  # a norm of each head's queries and keys (Qwen 3)
    activation: str = "gelu"  # gelu | gelu_tanh | relu | silu
    gated: bool = False  # feed-forward is down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))
    use_bias: bool = True  # on every linear map of a block and on LayerNorm
    qkv_bias: Optional[bool] = None  # on the maps to queries, keys and values; None: as use_bias (Qwen 2: only there)
    embedding_norm: bool = False  # LayerNorm and dropout on the sum of embeddings (BERT)
    scale_embeddings: bool = False  # token embeddings are multiplied by sqrt(d_model) (Transformer, Gemma)
    num_token_types: int = 0  # rows of the token type table (BERT: 2)
    tie_embeddings: bool = True  # the output matrix is the token embedding, transposed
    scale_tied_logits: bool = False  # tied logits are divided by sqrt(d_model) (T5 1.0)
    attention_scale: Optional[float] = None  # of attention logits; None: 1/sqrt(head_dim) (T5: 1, it is in the init)
    attention_logit_cap: Optional[float] = None  # attention logits become cap * tanh(logits / cap) (Gemma 2)
    final_logit_cap: Optional[float] = None  # the same, of the logits over the vocabulary (Gemma 2)
    input_convolution: Optional[int] = None  # width of a convolution beside the first block (DeBERTa v2: 3)
    masked_lm_head: bool = False  # dense, activation, norm before the output matrix, and an output bias (BERT)
    enhanced_mask_decoder: bool = False  # absolute positions, which the last block alone sees (DeBERTa)
    pair_head: bool = False  # how two segments belong together, from the first token (BERT: NSP, ALBERT: SOP)
    replaced_token_head: bool = False  # for each token, whether it was replaced (ELECTRA's discriminator)
    replaced_token_context: bool = False  # that head sees norm(x + x of the first token) instead of x (DeBERTa v3)
    generator: Optional[Generator] = None  # of the replacements, trained along with the discriminator (ELECTRA)
    dropout_rate: float = 0.0
    init_stddev: Optional[float] = 0.02  # normal init of every matrix; None: T5's, by fan-in
    scale_residual_init: bool = False  # matrices that write to the residual stream start at 1/sqrt(2 L) of it (GPT-2)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def decoder_layers(self) -> int:
        """Blocks of an encoder-decoder's second stack."""
        return self.num_decoder_layers or self.num_layers

    @property
    def embedding_width(self) -> int:
        return self.embedding_dim or self.d_model

    @property
    def dim_per_head(self) -> int:
        return self.head_dim or self.d_model // self.num_heads


# --- the rest of a run ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class DataConfig:
    source: Choice  # where documents come from: a class of pretrainax.data.sources
    sequence_length: int = 512  # tokens of an example's input (encoder input for an encoder-decoder)
    packing: Optional[Choice] = None  # Windows | FirstFit | BestFit | OneEach; None: what fits the objective
    drop_duplicates: bool = False  # documents that are equal to an earlier one of their split
    near_duplicates: Optional[Choice] = None  # NearDuplicates: drop documents that are nearly equal to an earlier one
    quality: Optional[Choice] = None  # QualityFilter: drop documents that are no good text
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
    steps: int = 1000
    global_batch_size: int = 32  # examples of one update, over all devices and micro-batches
    accumulate: int = 1  # micro-batches of one update
    seed: int = 0  # of parameters, dropout, data order and masks
    dtype: str = "auto"  # of activations: float32 | bfloat16 | auto: bfloat16 on TPU and GPU
    z_loss: float = 0.0  # weight of log(Z)^2 (PaLM: 1e-4)
    label_smoothing: float = 0.0
    on_nonfinite: str = free("stop")  # a loss or gradient that is not finite: stop | skip that update and count it
    on_spike: str = free("ignore")  # ignore | stop | rollback: the run goes back, also where on_nonfinite would stop it
    spike_deviations: float = free(6.0)  # loss or log gradient norm, so many robust deviations above the median ...
    spike_steps: int = free(3)  # ... for so many steps in a row is a spike
    spike_window: int = free(128)  # steps before those, of which median and deviation are
    rollback_steps: int = free(100)  # the run goes back to so many steps before the spike ...
    rollback_skip: int = free(200)  # ... and the next so many batches are left out
    max_rollbacks: int = free(20)  # one more, and the run fails
    log_every: int = free(50)
    attention: str = free("auto")  # xla | cudnn | tpu_flash | tpu_splash | auto: the fastest that fits
    remat: str = free("none")  # kept for the backward: none: all | block: block inputs | dots: matrix products
    scan_unroll: int = free(0)  # blocks in each turn of the scan over layers; 0: 1, and on a CPU, where loops cost, 4
    loss_chunk: int = free(0)  # tokens of a device whose logits exist at a time; 0: 4,096, on a CPU 1,024


@dataclasses.dataclass
class EvaluateConfig:
    every: int = free(500)  # steps
    batches: int = free(20)  # of the validation split, always the same ones; 0: all
    patience: Optional[int] = None  # stop after this many evaluations without a new best loss


@dataclasses.dataclass
class CheckpointConfig:
    every: int = free(500)  # steps; also at the end and on SIGTERM
    keep: int = free(2)  # newest ones kept, beside the best
    init_from: Optional[str] = None  # parameters to start from: a PretrainAX workdir, or a Hugging Face directory


@dataclasses.dataclass
class Experiment:
    model: ModelConfig
    tokenizer: Choice  # a class of pretrainax.tokenizer
    data: DataConfig
    objective: Choice  # a class of pretrainax.data.objectives
    optimizer: Choice  # a class of pretrainax.optim.optimizers
    schedule: Choice  # a class of pretrainax.optim.optimizers
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)


# --- JSON both ways ------------------------------------------------------------------------------------------------


def to_json(config: Any) -> Any:
    """A config (or a part of one) as plain dicts and lists; a Choice carries its class name as "type"."""
    if dataclasses.is_dataclass(config):
        fields = {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"type": type(config).__name__, **fields} if isinstance(config, Choice) else fields
    return [to_json(x) for x in config] if isinstance(config, (tuple, list)) else config


def from_json(cls: Any, value: Any, path: str = "config") -> Any:
    """The inverse of `to_json`: an object of type `cls` (a dataclass, an Optional of one, or a plain type)."""
    if isinstance(value, dict):
        if "type" in value:
            cls = Choice.named(str(value["type"]))
        elif typing.get_origin(cls) in (typing.Union, types.UnionType):
            (cls,) = (t for t in typing.get_args(cls) if t is not type(None))
        hints = typing.get_type_hints(cls)
        for name in value.keys() - (fields := {f.name for f in dataclasses.fields(cls)}) - {"type"}:
            raise UserError(f"{path}: unknown field {name!r}, {nearest(name, fields)}")
        items = {k: from_json(hints[k], v, f"{path}.{k}") for k, v in value.items() if k != "type"}
        if wrong := [f"{path}.{k} is {x!r}, it must be {hints[k]}" for k, x in items.items() if not _fits(x, hints[k])]:
            raise UserError("; ".join(wrong))
        return cls(**items)
    return tuple(from_json(Any, v, path) for v in value) if isinstance(value, list) else value


def differences(old: Experiment, new: Experiment) -> list[str]:
    """The fields that change the mathematics and differ: "train.seed: 0 -> 1"."""
    return [f"{path}: {a!r} -> {b!r}" for path, a, b in _compare(old, new, "")]


def _compare(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        for f in (f for f in dataclasses.fields(a) if not f.metadata.get("free")):
            yield from _compare(getattr(a, f.name), getattr(b, f.name), f"{path}.{f.name}".lstrip("."))
    elif a != b:
        yield path, a, b


def load(path: str) -> Experiment:
    """Reads a run's config.json."""
    try:
        with open(path, encoding="utf-8") as f:
            return from_json(Experiment, dict(json.load(f)))
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise UserError(f"{path} is no config of a run ({e})") from e


def dump(experiment: Experiment) -> str:
    return json.dumps(to_json(experiment), indent=2) + "\n"
