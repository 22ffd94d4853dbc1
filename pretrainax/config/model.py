"""Defines the config of a model architecture, including the sizes of its stacks (encoder and decoder)."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Optional, TypeVar

from pretrainax.config.auto import Size
from pretrainax.config.choice import Choice, optional_in_json
from pretrainax.config.experts import MixtureOfExperts
from pretrainax.config.heads import HeadConfig
from pretrainax.config.kinds import ModelPart, Use
from pretrainax.config.latent_attention import LatentAttention
from pretrainax.config.multi_token import MultiTokenPrediction
from pretrainax.config.positions import LearnedPositions, Position
from pretrainax.config.sparse_attention import SlidingWindows, SparseAttention

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment

LayerKind = Literal["global", "local"]  # attention to all tokens, or only to tokens within a window
FAMILIES = ("encoder", "encoder_decoder", "decoder")  # a ModelPart in `config.model.parts` can add a family
OfPart = TypeVar("OfPart", bound=ModelPart)


def known_families() -> tuple[str, ...]:
    """Lists the allowed values of config.model.family, including the families of imported ModelPart classes."""
    part_families = (cls.family for cls in Choice.imported() if issubclass(cls, ModelPart) and cls.family)
    return tuple(dict.fromkeys((*FAMILIES, *part_families)))


@dataclasses.dataclass
class Generator(Choice):
    """Config of ELECTRA's generator, a masked language model that proposes replacement tokens.

    All other settings come from config.model.
    """

    num_layers: int = 12  # blocks
    d_model: int = 256  # width of the residual stream
    d_ff: int = 1024  # width inside the feed-forward
    num_heads: int = 4  # attention heads
    # all: generator and discriminator have the same embeddings (ELECTRA) | gradient_disentangled: the discriminator has
    # the embeddings of the generator plus a trained difference (DeBERTa v3)
    share_embeddings: Literal["all", "gradient_disentangled"] = "all"
    loss_weight: float = 50.0  # weight of the discriminator's loss (Clark et al. 2020, section 2)

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path = "config.model.generator"
        for name in ("num_layers", "d_model", "d_ff", "num_heads"):
            if getattr(self, name) < 1:
                yield f"{path}.{name} is {getattr(self, name)}, it must be at least 1"
        if self.num_heads > 0 and self.d_model % self.num_heads:
            yield f"{path}.d_model {self.d_model} is not a multiple of {path}.num_heads {self.num_heads}"
        if self.loss_weight <= 0:
            yield f"{path}.loss_weight is {self.loss_weight}, it must be greater than 0"
        model = experiment.model
        if model.experts is not None:
            yield f"{path} does not support config.model.experts: set one of them to None"
        if model.enhanced_mask_decoder and self.num_layers < 2:
            yield (
                f"{path}.num_layers is {self.num_layers}, and config.model.enhanced_mask_decoder requires at least 2 "
                "layers"
            )
        encoder = dataclasses.replace(
            model, d_model=self.d_model, num_heads=self.num_heads, num_kv_heads=None, head_dim=None
        )
        yield from model.position.head_problems(path, encoder)


@dataclasses.dataclass
class DecoderSizes(Choice):
    """Sizes of the decoder of an encoder-decoder, if they differ from the encoder (T5Gemma 9b-2b)."""

    d_model: int  # width of the residual stream
    d_ff: int  # width inside the feed-forward
    num_heads: int  # attention heads
    num_kv_heads: Optional[int] = None  # fewer than num_heads: grouped-query attention; None: num_heads
    head_dim: Optional[int] = None  # width of a head; None: d_model // num_heads

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, model = "config.model.decoder", experiment.model
        for name in ("d_model", "d_ff", "num_heads"):
            if getattr(self, name) < 1:
                yield f"{path}.{name} is {getattr(self, name)}, it must be at least 1"
        if model.family != "encoder_decoder":
            yield f"{path} requires an encoder_decoder, config.model.family is {model.family!r}: set it to None"
        elif self.d_model != model.d_model:
            for name, required in (("separate_embeddings", True), ("embedding_dim", None), ("num_token_types", 0)):
                if (value := getattr(model, name)) != required:
                    yield (
                        f"{path}.d_model is {self.d_model} and config.model.d_model is {model.d_model}, so the stacks "
                        f"cannot share embeddings: config.model.{name} is {value}, set it to {required}"
                    )


@dataclasses.dataclass
class ModelConfig:
    """Config of a model architecture; each field differs between at least two published models.

    The functions of `pretrainax.zoo` return the configs of published models.
    """

    # encoder, encoder_decoder or decoder; or the family of a ModelPart that is a whole model (ELMo: recurrent)
    family: str = "decoder"
    # rows of the embedding table; can exceed the tokenizer's size (padding for the hardware); auto: the tokenizer's
    # size, rounded up to a multiple of 128
    vocab_size: Size = 32_000
    num_layers: int = 12  # blocks of each stack (an encoder-decoder has two stacks)
    # blocks of the decoder of an encoder-decoder; None: num_layers (ByT5: fewer)
    num_decoder_layers: Optional[int] = None
    # sizes of the decoder of an encoder-decoder; None: the sizes of the encoder (T5Gemma 9b-2b: a 9b encoder and a 2b
    # decoder)
    decoder: Optional[DecoderSizes] = None
    share_layers: bool = False  # one block, applied num_layers times (ALBERT)
    d_model: int = 768  # width of the residual stream
    d_ff: int = 3072  # width inside the feed-forward, or of an LSTM's cell state
    num_heads: int = 12  # attention heads
    num_kv_heads: Optional[int] = None  # fewer than num_heads: grouped-query attention; None: num_heads
    head_dim: Optional[int] = None  # width of a head; None: d_model // num_heads
    embedding_dim: Optional[int] = None  # width of the embeddings, projected to d_model (ALBERT); None: d_model
    position: Position = dataclasses.field(default_factory=LearnedPositions)  # position encoding
    layer_pattern: tuple[LayerKind, ...] = ("global",)  # attention of each layer; the pattern repeats (Gemma 2)
    # number of tokens that a token attends to in a local layer: the token itself and earlier tokens; in an encoder,
    # half of the window before and half after the token. None: no local layers
    window: Optional[int] = None
    # window of the encoder of an encoder-decoder, half before and half after a token (T5Gemma: twice the window of the
    # decoder); None: window
    encoder_window: Optional[int] = None
    norm: Literal["layer", "rms", "rms_plus_one"] = "layer"  # rms_plus_one: the scale is 1 + the parameter (Gemma)
    # pre: x + f(norm(x)) | both: x + norm(f(norm(x))) | after: x + norm(f(x)) | post: norm(x + f(x)). All but post add
    # a final norm after the last block.
    norm_at: Literal["pre", "post", "both", "after"] = "pre"
    parallel: bool = False  # attention and feed-forward read the same norm of x, and both outputs are added to x (PaLM)
    norm_epsilon: float = 1e-5  # added to the variance in norms
    # the first norm of the first block also replaces the input of the residual stream (ModernBERT)
    norm_starts_stream: bool = False
    # projects keys and values from one low-dimensional vector per token (DeepSeek-V2); None: directly from the stream
    latent_attention: Optional[LatentAttention] = None
    # attention to a subset of the tokens, at a cost linear in the length (Longformer); None: dense attention
    sparse_attention: Optional[SparseAttention] = None
    qk_norm: bool = False  # normalizes the queries and keys of each head (Qwen 3)
    qk_norm_heads: Literal["each", "all"] = "each"  # over each head, or over all heads together (OLMo 2)
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"] = "gelu"  # activation of the feed-forward
    gated: bool = False  # feed-forward is down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))
    # with a limit, a gated feed-forward is down(activation(gate(x)) * (up(x) + 1)); gate(x) is clipped to at most the
    # limit, and up(x) to [-limit, limit] (gpt-oss: 7). None: no limit
    gate_limit: Optional[float] = None
    experts: Optional[MixtureOfExperts] = None  # replaces each feed-forward; None: dense feed-forwards
    use_bias: bool = True  # bias of every linear layer of a block, and of LayerNorm
    # bias of the query, key and value projections (Qwen 2: these are the only layers with a bias); None: use_bias
    qkv_bias: Optional[bool] = None
    embedding_norm: bool = False  # LayerNorm and dropout on the sum of embeddings (BERT)
    scale_embeddings: bool = False  # token embeddings are multiplied by sqrt(d_model) (Transformer, Gemma)
    num_token_types: int = 0  # number of token types, which have embeddings (BERT: 2); 0: no token types
    separate_embeddings: bool = False  # an encoder-decoder has one token embedding table per stack (T5Gemma)
    tie_embeddings: bool = True  # the output matrix is the transposed token embedding (of the decoder)
    scale_tied_logits: bool = False  # tied logits are divided by sqrt(d_model) (T5 1.0)
    logit_scale: Optional[float] = None  # multiplies the vocabulary logits (Grok-1: 1/sqrt(3)); None: 1
    attention_scale: Optional[float] = None  # scale of attention logits; None: 1/sqrt(head_dim) (T5: 1, scaled in init)
    attention_sinks: bool = False  # adds a trained logit per head to the softmax, without a value (gpt-oss)
    attention_logit_cap: Optional[float] = None  # attention logits become cap * tanh(logits / cap) (Gemma 2)
    final_logit_cap: Optional[float] = None  # the same cap for the vocabulary logits (Gemma 2)
    input_convolution: Optional[int] = None  # width of a convolution parallel to the first block (DeBERTa v2: 3)
    output_bias: Optional[bool] = None  # bias of the vocabulary logits (Phi); None: only with masked_lm_head
    masked_lm_head: bool = False  # dense layer, activation and norm before the output matrix, and an output bias (BERT)
    enhanced_mask_decoder: bool = False  # adds absolute positions, which only the last block reads (DeBERTa)
    pair_head: bool = False  # classifies the relation of two segments from the first token (BERT: NSP, ALBERT: SOP)
    replaced_token_head: bool = False  # predicts for each token whether it was replaced (ELECTRA's discriminator)
    replaced_token_context: bool = False  # the head reads norm(x + x of the first token) instead of x (DeBERTa v3)
    # also predicts the tokens after the next one, during training (DeepSeek-V3); None: only the next token
    multi_token: Optional[MultiTokenPrediction] = None
    # generator of the replacements, trained together with the discriminator (ELECTRA); None: no generator
    generator: Optional[Generator] = None
    head: Optional[HeadConfig] = None  # task head, which replaces the pretraining heads; None: pretraining heads
    dropout_rate: float = 0.0  # dropout of the output of each sublayer, in training
    attention_dropout_rate: float = 0.0  # dropout of attention weights (BERT: 0.1); requires attention 'xla' or 'tiled'
    # standard deviation of the normal initializer of every matrix; None: initializers of T5, which depend on the fan-in
    init_stddev: Optional[float] = 0.02
    scale_residual_init: bool = False  # divides init_stddev of matrices that write to the stream by sqrt(2 L) (GPT-2)
    # model components of other packages (docs/how-to/own-code.md)
    parts: tuple[ModelPart, ...] = optional_in_json((), is_free=False)

    def part(self, kind: type[OfPart]) -> Optional[OfPart]:
        """Returns the first item of `parts` that is an instance of `kind`, or None if no item is an instance."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def unsupported(self, use: Use) -> Optional[str]:
        """Returns the reason why an item of `parts` does not support a feature, or None if all items support it."""
        return next((part.unsupported[use] for part in self.parts if use in part.unsupported), None)

    @property
    def own_model(self) -> Optional[ModelPart]:
        """Returns the item of `parts` that is a whole model, or None if the model is a Transformer of this package."""
        return next((part for part in self.parts if part.family), None)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def stacks(self) -> dict[str, "ModelConfig"]:
        """Returns {name of the stack in parameter paths: config of the stack}.

        Each value configures a model with a single stack, an encoder or a decoder.
        """
        if self.family != "encoder_decoder":
            return {self.family: self}
        sizes = {} if self.decoder is None else vars(self.decoder)
        overrides = {
            "encoder": {"window": self.encoder_window or self.window},
            "decoder": {"num_layers": self.num_decoder_layers or self.num_layers, **sizes},
        }
        unset = {"num_decoder_layers": None, "decoder": None, "encoder_window": None, "separate_embeddings": False}
        return {name: dataclasses.replace(self, family=name, **unset, **fields) for name, fields in overrides.items()}

    @property
    def last_stack(self) -> "ModelConfig":
        """Returns the config of the last stack, whose last hidden states the heads read; see `stacks`."""
        return list(self.stacks.values())[-1]

    @property
    def sized(self) -> dict[str, "ModelConfig"]:
        """Maps the path of each config section with size fields to the config of a stack that has these sizes.

        The paths are "config.model" and, if `decoder` is set, "config.model.decoder".
        """
        paths = ["config.model"] if self.decoder is None else ["config.model", "config.model.decoder"]
        return dict(zip(paths, self.stacks.values(), strict=False))

    def format_size(self, size: str) -> str:
        """Formats the value of a size field: "768", or "12 + 12" with one number per stack.

        `num_layers` has one number per stack. If `decoder` is set, the other sizes also have one number per stack.

        Args:
          size: name of the field.
        """
        stacks = self.stacks if size == "num_layers" else self.sized
        return " + ".join(str(getattr(stack, size)) for stack in stacks.values())

    @property
    def stack_blocks(self) -> list[int]:
        """Returns the number of blocks with separate parameters in each stack, which is 1 with `share_layers`."""
        return [1 if self.share_layers else stack.num_layers for stack in self.stacks.values()]

    @property
    def reads_question(self) -> bool:
        """Returns True if the model has sliding windows, and the question tokens of each row are its global tokens."""
        windows = self.sparse_attention
        return isinstance(windows, SlidingWindows) and windows.global_tokens == "question"

    @property
    def stream_width(self) -> int:
        """Returns the width of the model's last hidden states."""
        return self.d_model if self.own_model is None else self.own_model.stream_width(self)

    @property
    def embedding_width(self) -> int:
        return self.embedding_dim or self.d_model

    @property
    def dim_per_head(self) -> int:
        """Returns the dimension of one attention head's queries and keys."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def position_dim(self) -> int:
        """Returns the number of dimensions of each query or key head that rotary positions may rotate."""
        return self.dim_per_head if self.latent_attention is None else self.latent_attention.rotary_dim
