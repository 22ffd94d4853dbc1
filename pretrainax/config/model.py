"""The configuration of an architecture: its fields, and the sizes of what it has beside its first stack."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Optional, TypeVar

from pretrainax.config.auto import Size
from pretrainax.config.choice import Choice, later
from pretrainax.config.experts import MixtureOfExperts
from pretrainax.config.heads import HeadConfig
from pretrainax.config.kinds import ModelPart, Use
from pretrainax.config.latent_attention import LatentAttention
from pretrainax.config.multi_token import MultiTokenPrediction
from pretrainax.config.positions import LearnedPositions, Position
from pretrainax.config.sparse_attention import SlidingWindows, SparseAttention

if TYPE_CHECKING:
    from pretrainax.config.experiment import Experiment

LayerKind = Literal["global", "local"]  # a token attends to all others, or to a window
FAMILIES = ("encoder", "encoder_decoder", "decoder")  # a part of `config.model.parts` may add one
OfPart = TypeVar("OfPart", bound=ModelPart)


def known_families() -> tuple[str, ...]:
    """Returns the allowed values of config.model.family, with the families of imported parts."""
    parts = (cls.family for cls in Choice.imported() if issubclass(cls, ModelPart) and cls.family)
    return tuple(dict.fromkeys((*FAMILIES, *parts)))


@dataclasses.dataclass
class Generator(Choice):
    """ELECTRA's generator: a masked LM that proposes replacements, built as the model but for these sizes."""

    num_layers: int = 12  # blocks
    d_model: int = 256  # width of the residual stream
    d_ff: int = 1024  # width inside the feed-forward
    num_heads: int = 4  # of attention
    # all (ELECTRA); gradient_disentangled: plus a trained difference (DeBERTa v3)
    share_embeddings: Literal["all", "gradient_disentangled"] = "all"
    loss_weight: float = 50.0  # of the discriminator's loss (Clark et al. 2020, section 2)

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path = "config.model.generator"
        for name in ("num_layers", "d_model", "d_ff", "num_heads"):
            if getattr(self, name) < 1:
                yield f"{path}.{name} is {getattr(self, name)}, it must be at least 1"
        if self.num_heads > 0 and self.d_model % self.num_heads:
            yield f"{path}.d_model {self.d_model} is not a multiple of {path}.num_heads {self.num_heads}"
        if self.loss_weight <= 0:
            yield f"{path}.loss_weight is {self.loss_weight}, it must be greater than 0"


@dataclasses.dataclass
class DecoderSizes(Choice):
    """Says how large an encoder-decoder's second stack is where it is not as large as the first (T5Gemma 9b-2b)."""

    d_model: int  # width of the residual stream
    d_ff: int  # width inside the feed-forward
    num_heads: int  # of attention
    num_kv_heads: Optional[int] = None  # fewer than num_heads: grouped-query attention; None: as many
    head_dim: Optional[int] = None  # width of a head; None: d_model // num_heads

    def problems(self, experiment: "Experiment") -> Iterator[str]:
        path, model = "config.model.decoder", experiment.model
        for name in ("d_model", "d_ff", "num_heads"):
            if getattr(self, name) < 1:
                yield f"{path}.{name} is {getattr(self, name)}, it must be at least 1"
        if model.family != "encoder_decoder":
            yield f"{path} is of an encoder_decoder, config.model.family is {model.family!r}: set it to None"
        elif self.d_model != model.d_model:
            for name, wanted in (("separate_embeddings", True), ("embedding_dim", None), ("num_token_types", 0)):
                if (value := getattr(model, name)) != wanted:
                    yield (
                        f"{path}.d_model is {self.d_model} and config.model.d_model {model.d_model}, so no table is "
                        f"for both stacks: config.model.{name} is {value}, set it to {wanted}"
                    )


@dataclasses.dataclass
class ModelConfig:
    """An architecture. A field exists only where two published models differ in it. Presets: `pretrainax.zoo`."""

    # encoder, encoder_decoder or decoder; or the family of a part that is a whole model (ELMo: recurrent)
    family: str = "decoder"
    # rows of the embedding; may exceed the tokenizer's size (padding for the hardware); auto: the next multiple of 128
    vocab_size: Size = 32_000
    num_layers: int = 12  # blocks of each stack (an encoder-decoder has two stacks)
    num_decoder_layers: Optional[int] = None  # of an encoder-decoder's second stack; None: num_layers (ByT5: fewer)
    # sizes of that second stack; None: those of the first (T5Gemma 9b-2b: an encoder of 9b, a decoder of 2b)
    decoder: Optional[DecoderSizes] = None
    share_layers: bool = False  # one block, applied num_layers times (ALBERT)
    d_model: int = 768  # width of the residual stream
    d_ff: int = 3072  # width inside the feed-forward, or of the memory of an LSTM
    num_heads: int = 12  # of attention
    num_kv_heads: Optional[int] = None  # fewer than num_heads: grouped-query attention; None: as many
    head_dim: Optional[int] = None  # width of a head; None: d_model // num_heads
    embedding_dim: Optional[int] = None  # width of the embeddings, projected to d_model (ALBERT); None: d_model
    position: Position = dataclasses.field(default_factory=LearnedPositions)  # where a token stands
    layer_pattern: tuple[LayerKind, ...] = ("global",)  # attention of each layer, repeated (Gemma 2)
    window: Optional[int] = None  # tokens a local layer sees: itself and those before it; an encoder, half on each side
    # the same of an encoder-decoder's encoder, half on each side (T5Gemma: twice the decoder's); None: window
    encoder_window: Optional[int] = None
    norm: Literal["layer", "rms", "rms_plus_one"] = "layer"  # plus one: the scale is 1 + the parameter (Gemma)
    # pre: x + f(norm(x)) | both: x + norm(f(norm(x))) | after: x + norm(f(x)); of these a last norm is on top |
    # post: norm(x + f(x))
    norm_at: Literal["pre", "post", "both", "after"] = "pre"
    parallel: bool = False  # attention and feed-forward read the same norm of x, and both are added to x (PaLM)
    norm_epsilon: float = 1e-5  # added to the variance
    norm_starts_stream: bool = False  # the first block's first norm is of the residual stream too (ModernBERT)
    latent_attention: Optional[LatentAttention] = None  # keys and values are made of a short vector (DeepSeek-V2)
    # a token meets a part of its text, at a cost that is linear in the length (Longformer); None: all that it may see
    sparse_attention: Optional[SparseAttention] = None
    qk_norm: bool = False  # a norm of each head's queries and keys (Qwen 3)
    qk_norm_heads: Literal["each", "all"] = "each"  # that norm is of each head, or of all side by side (OLMo 2)
    activation: Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "silu"] = "gelu"  # of the feed-forward
    gated: bool = False  # feed-forward is down(activation(gate(x)) * up(x)) instead of down(activation(up(x)))
    # a gated one is down(activation(gate(x)) * (up(x) + 1)), both sides clipped there before (gpt-oss: 7); None: not so
    gate_limit: Optional[float] = None
    experts: Optional[MixtureOfExperts] = None  # in the place of each feed-forward; None: there is one, for all tokens
    use_bias: bool = True  # on every linear map of a block and on LayerNorm
    qkv_bias: Optional[bool] = None  # on the maps to queries, keys and values; None: as use_bias (Qwen 2: only there)
    embedding_norm: bool = False  # LayerNorm and dropout on the sum of embeddings (BERT)
    scale_embeddings: bool = False  # token embeddings are multiplied by sqrt(d_model) (Transformer, Gemma)
    num_token_types: int = 0  # rows of the token type table (BERT: 2)
    separate_embeddings: bool = False  # an encoder-decoder has a table of tokens for each side (T5Gemma)
    tie_embeddings: bool = True  # the output matrix is the token embedding (of the decoder), transposed
    scale_tied_logits: bool = False  # tied logits are divided by sqrt(d_model) (T5 1.0)
    logit_scale: Optional[float] = None  # logits over the vocabulary are multiplied by it (Grok-1: 1/sqrt(3)); None: 1
    attention_scale: Optional[float] = None  # of attention logits; None: 1/sqrt(head_dim) (T5: 1, it is in the init)
    attention_sinks: bool = False  # a trained logit of each head is in the softmax, and adds nothing (gpt-oss)
    attention_logit_cap: Optional[float] = None  # attention logits become cap * tanh(logits / cap) (Gemma 2)
    final_logit_cap: Optional[float] = None  # the same, of the logits over the vocabulary (Gemma 2)
    input_convolution: Optional[int] = None  # width of a convolution beside the first block (DeBERTa v2: 3)
    output_bias: Optional[bool] = None  # on the logits over the vocabulary (Phi); None: of a masked_lm_head only
    masked_lm_head: bool = False  # dense, activation, norm before the output matrix, and an output bias (BERT)
    enhanced_mask_decoder: bool = False  # absolute positions, which the last block alone sees (DeBERTa)
    pair_head: bool = False  # how two segments belong together, from the first token (BERT: NSP, ALBERT: SOP)
    replaced_token_head: bool = False  # for each token, whether it was replaced (ELECTRA's discriminator)
    replaced_token_context: bool = False  # that head sees norm(x + x of the first token) instead of x (DeBERTa v3)
    # the tokens after the next one are told too, in training (DeepSeek-V3); None: they are not
    multi_token: Optional[MultiTokenPrediction] = None
    generator: Optional[Generator] = None  # of the replacements, trained along with the discriminator (ELECTRA)
    head: Optional[HeadConfig] = None  # of a task, in the place of all other heads; None: the model is pretrained
    dropout_rate: float = 0.0  # set to zero in training, of what each half of a block adds
    attention_dropout_rate: float = 0.0  # the same, of the weights of attention (BERT: 0.1); runs with attention 'xla'
    init_stddev: Optional[float] = 0.02  # normal init of every matrix; None: T5's, by fan-in
    scale_residual_init: bool = False  # matrices that write to the residual stream start at 1/sqrt(2 L) of it (GPT-2)
    parts: tuple[ModelPart, ...] = later((), is_free=False)  # bricks of other packages (docs/extending.md)

    def part(self, kind: type[OfPart]) -> Optional[OfPart]:
        """Returns the first of `parts` that is of a kind."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def unsupported(self, use: Use) -> Optional[str]:
        """Returns why a part of the model does not support a use; None: all of them do."""
        return next((part.unsupported[use] for part in self.parts if use in part.unsupported), None)

    @property
    def own_model(self) -> Optional[ModelPart]:
        """Returns the part that is a whole model; None: the model is a Transformer of this package."""
        return next((part for part in self.parts if part.family), None)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def stacks(self) -> dict[str, "ModelConfig"]:
        """Returns each stack as a model of its own, an encoder or a decoder, by its name in the paths of parameters."""
        if self.family != "encoder_decoder":
            return {self.family: self}
        sizes = {} if self.decoder is None else vars(self.decoder)
        own = {
            "encoder": {"window": self.encoder_window or self.window},
            "decoder": {"num_layers": self.num_decoder_layers or self.num_layers, **sizes},
        }
        of_two = {"num_decoder_layers": None, "decoder": None, "encoder_window": None, "separate_embeddings": False}
        return {name: dataclasses.replace(self, family=name, **of_two, **fields) for name, fields in own.items()}

    @property
    def last_stack(self) -> "ModelConfig":
        """Returns the stack of which heads read the last hidden state, as `stacks` has it."""
        return list(self.stacks.values())[-1]

    @property
    def sized(self) -> dict[str, "ModelConfig"]:
        """Returns the stacks whose sizes are said apart, by the path of what says them."""
        paths = ["config.model"] if self.decoder is None else ["config.model", "config.model.decoder"]
        return dict(zip(paths, self.stacks.values(), strict=False))

    def shown(self, size: str) -> str:
        """Returns a size for people: layers of each stack, "12 + 12"; others of both where they are said apart."""
        stacks = self.stacks if size == "num_layers" else self.sized
        return " + ".join(str(getattr(stack, size)) for stack in stacks.values())

    @property
    def stack_blocks(self) -> list[int]:
        """Returns how many blocks with parameters of their own each stack has."""
        return [1 if self.share_layers else stack.num_layers for stack in self.stacks.values()]

    @property
    def reads_question(self) -> bool:
        """Returns True if attention is told of each row which tokens are of its question."""
        windows = self.sparse_attention
        return isinstance(windows, SlidingWindows) and windows.global_tokens == "question"

    @property
    def stream_width(self) -> int:
        """Returns the width of the last hidden state."""
        return self.d_model if self.own_model is None else self.own_model.stream_width(self)

    @property
    def embedding_width(self) -> int:
        return self.embedding_dim or self.d_model

    @property
    def dim_per_head(self) -> int:
        """Returns the width of a head's queries and keys."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def position_dim(self) -> int:
        """Returns how many numbers of a head's queries and keys positions may turn."""
        return self.dim_per_head if self.latent_attention is None else self.latent_attention.rotary_dim
