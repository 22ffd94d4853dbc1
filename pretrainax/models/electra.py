"""ELECTRA: a generator (a masked LM) replaces tokens, and a discriminator predicts which tokens were replaced.

Sources: Clark et al. 2020 (arXiv 2003.10555), and for embedding sharing DeBERTa v3 (He et al. 2021, arXiv 2111.09543,
section 3.3). The model consists of two encoders: the discriminator, which is later fine-tuned, and the generator. Both
are in one parameter tree. The parameters of the discriminator have the same paths as in an encoder. The tree also has

    generator/...             the parameters that the generator does not share
    embedding_difference/...  added to the shared tables for the discriminator, with gradient disentanglement only

`discriminator` and `generator` return the parameters of one encoder, and `join` merges two encoders into one tree.
Training uses these functions too, so the exported parameters are the trained parameters.
"""

import copy
import dataclasses
from typing import Optional, cast

import chex
import jax
import jax.numpy as jnp

from pretrainax.config import Generator, ModelConfig, UserError
from pretrainax.data.batch import Batch, has_loss, is_gathered
from pretrainax.layers.compute import Compute
from pretrainax.layers.sums import add_sums
from pretrainax.models.base import register_model
from pretrainax.models.encoder import Encoder
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.outputs import Outputs
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import logical_spec
from pretrainax.sharding.param_paths import PyTree

# config.model.generator.share_embeddings -> shared modules. ELECTRA's code has one scope for all embedding modules.
# DeBERTa's code shares token and position tables, each plus a difference, and has a separate norm for each encoder.
SHARED = {
    "all": ("token_embedding", "position_embedding", "token_type_embedding", "embedding_norm"),
    "gradient_disentangled": ("token_embedding", "position_embedding"),
}
_SAMPLE_CHUNK = 4096  # replacements are sampled from the vocabulary logits of this number of tokens at a time


def component_configs(config: ModelConfig) -> list[ModelConfig]:
    """Returns the config itself in a list; for ELECTRA, the configs of the generator and the discriminator."""
    return [config] if config.generator is None else [generator_config(config), discriminator_config(config)]


def discriminator_config(config: ModelConfig) -> ModelConfig:
    """Returns the config of the discriminator, an encoder.

    Only the generator has the enhanced mask decoder, as in the released code of DeBERTa v3.
    """
    return dataclasses.replace(copy.deepcopy(config), generator=None, enhanced_mask_decoder=False)


def generator_config(config: ModelConfig) -> ModelConfig:
    """Returns the config of the generator, an encoder with a masked-LM head.

    The embeddings of the generator have the width of the discriminator's embeddings. If its `d_model` differs from that
    width, they are projected.
    """
    sizes, width = _generator_of(config), config.embedding_width
    heads = {field.name: False for field in dataclasses.fields(config) if field.name.endswith("_head")}
    return dataclasses.replace(
        copy.deepcopy(config),
        num_layers=sizes.num_layers,
        d_model=sizes.d_model,
        d_ff=sizes.d_ff,
        num_heads=sizes.num_heads,
        num_kv_heads=None,
        head_dim=None,
        embedding_dim=None if sizes.d_model == width else width,
        replaced_token_context=False,
        generator=None,
        **{**heads, "masked_lm_head": True},  # the discriminator has the other heads
    )


def discriminator(config: ModelConfig, params: PyTree) -> tuple[ModelConfig, PyTree]:
    """Returns the config and the parameters of the discriminator, as those of a separate encoder.

    With gradient disentanglement (He et al. 2021, section 3.3), the embedding tables of the discriminator are the
    shared tables plus the difference, and no gradient of the discriminator reaches the shared tables.

    Args:
      config: the config of the ELECTRA model.
      params: the parameter tree of the ELECTRA model.
    """
    own = {name: x for name, x in params.items() if name not in ("generator", "embedding_difference")}
    for name, difference in params.get("embedding_difference", {}).items():
        own[name] = jax.tree.map(lambda x, d: jax.lax.stop_gradient(x) + d, params[name], difference)
    return discriminator_config(config), own


def generator(config: ModelConfig, params: PyTree) -> tuple[ModelConfig, PyTree]:
    """Returns the config and the parameters of the generator, as those of a separate encoder."""
    shared = {name: params[name] for name in _shared(config) if name in params}
    return generator_config(config), {**shared, **params["generator"]}


def join(config: ModelConfig, discriminator: PyTree, generator: PyTree) -> PyTree:
    """Returns the parameter tree of an ELECTRA model from the parameters of its discriminator and of its generator.

    Raises:
      UserError: an embedding table that `config` shares differs between the two encoders.
    """
    shared = [name for name in _shared(config) if name in discriminator and name in generator]
    joined = dict(discriminator)
    joined["generator"] = {name: x for name, x in generator.items() if name not in shared}
    if _disentangled(config):
        minus = lambda a, b: a - b  # noqa: E731
        differences = {name: jax.tree.map(minus, discriminator[name], generator[name]) for name in shared}
        return {**joined, **{name: generator[name] for name in shared}, "embedding_difference": differences}
    for name in shared:
        if not jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), discriminator[name], generator[name])):
            raise UserError(
                f"generator and discriminator were not pretrained together: they differ in {name}, but "
                f"config.model.generator.share_embeddings={_generator_of(config).share_embeddings!r} shares it"
            )
    return joined


def _generator_of(config: ModelConfig) -> Generator:
    """Returns `config.generator`, which must not be None."""
    assert config.generator is not None
    return config.generator


def _shared(config: ModelConfig) -> tuple[str, ...]:
    return SHARED[_generator_of(config).share_embeddings]


def _disentangled(config: ModelConfig) -> bool:
    return _generator_of(config).share_embeddings == "gradient_disentangled"


@dataclasses.dataclass(frozen=True)
@register_model
class Electra:
    """A generator and a discriminator behind the interface `AnyModel`, for batches of masked language modeling.

    The outputs contain the heads of both encoders and the mask of replaced tokens. The random key "sample" of `rngs`
    determines the sampled replacements. Without this key, as in evaluation, the key of a row is derived from the tokens
    of the row, so a row has the same replacements in any batch.
    """

    config: ModelConfig
    compute: Compute

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.generator is not None

    @staticmethod
    def flops(config: ModelConfig, inputs: int, targets: int) -> None:
        """Returns None, because `models.flops` counts the FLOPs of both encoders."""

    def init(self, rngs: PyTree, batch: Batch, *, deterministic: bool) -> dict[str, PyTree]:
        def fresh(number, config):
            encoder = Encoder(config, self.compute)
            return encoder.init(_folded(rngs, number), batch, deterministic=deterministic)["params"]

        params = fresh(0, discriminator_config(self.config))
        own = fresh(1, generator_config(self.config))
        shared = [name for name in _shared(self.config) if name in own and name in params]
        params = {**params, "generator": {name: x for name, x in own.items() if name not in shared}}
        if _disentangled(self.config):
            params["embedding_difference"] = {name: jax.tree.map(jnp.zeros_like, params[name]) for name in shared}
        return {"params": params}

    def apply(
        self,
        variables: dict[str, PyTree],
        batch: Batch,
        *,
        deterministic: bool,
        rngs: Optional[dict[str, jax.Array]] = None,
    ) -> Outputs:
        rngs = dict(rngs or {})
        sample = rngs.pop("sample", None)

        def run(number, part, batch) -> Outputs:
            config, params = part(self.config, variables["params"])
            encoder, keys = Encoder(config, self.compute), _folded(rngs, number)
            outputs = encoder.apply({"params": params}, batch, deterministic=deterministic, rngs=keys)
            return cast(Outputs, outputs)  # Flax's type includes a tuple, which needs `mutable`

        generated = run(1, generator, batch)
        if not has_loss(batch):  # without a loss, only the generator runs
            return generated
        tokens, replaced = sample_replacements(generated.heads["lm"], batch, sample)
        detected = run(0, discriminator, {**batch, "tokens": tokens})
        replaced_output = detected.heads["replaced"].replace(
            replaced=replaced, weight=_generator_of(self.config).loss_weight
        )
        heads = {**generated.heads, **detected.heads, "replaced": replaced_output}
        return Outputs(heads, add_sums(generated.sums, detected.sums))


def _folded(keys: PyTree, number: int) -> PyTree:
    """Returns the random keys of encoder `number` (0 is the discriminator, 1 the generator).

    With equal keys, two encoders of the same shape would drop the same activations.
    """
    return jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)


def sample_replacements(
    generated: LanguageModelOutput, batch: Batch, sample: Optional[jax.Array] = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of a batch with the generator's replacements, and the mask of replaced tokens.

    At the predicted positions, tokens are sampled from the generator's softmax. All other tokens are unchanged. A
    sample that equals the original token counts as original (Clark et al. 2020, section 2). Samples have no gradient.

    Args:
      generated: the predictions [B, N]; N = K if the batch has masked_positions [B, K], else T.
      sample: a random key; None: the key of each row is derived from the sum of its tokens.

    Returns:
      The tokens, [B, T] int32, and the mask, [B, T] bool.
    """
    tokens, predicted = batch["tokens"], batch["loss_weights"] > 0
    rows, length = tokens.shape
    message = "predictions, targets and loss_weights are [B, N]"
    chex.assert_shape((batch["targets"], batch["loss_weights"]), generated.features.shape[:2], custom_message=message)
    if sample is None:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), tokens.sum(axis=1))
    else:
        keys = jax.random.split(sample, rows)
    if is_gathered(batch):
        places = jnp.where(predicted, batch["masked_positions"], length)  # unused slots contain 0; index T is dropped
        put = jax.vmap(lambda row, place, values: row.at[place].set(values, mode="drop"))
        fill = lambda values: put(tokens, places, values)  # noqa: E731
    else:
        places = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
        fill = lambda values: jnp.where(predicted, values, tokens)  # noqa: E731
    originals, written = fill(batch["targets"]), fill(_draw(generated, keys, places))
    return written, written != originals


def _draw(generated: LanguageModelOutput, keys: jax.Array, places: jax.Array) -> jax.Array:
    """Samples a token from the softmax of each prediction, [B, N] int32, as the argmax of logits + Gumbel noise.

    Sampling recomputes the logits, which costs a third of their loss, and draws a random number for each logit. Only
    the logits of one chunk of tokens exist at a time; the size of the chunk does not change the samples.

    Args:
      keys: a random key for each row, [B].
      places: [B, N], the position of each prediction in its row. The noise depends on the key and this position.
    """
    generated = jax.lax.stop_gradient(generated)
    matrix = constrain(generated.unembedding.astype(generated.features.dtype), logical_spec(None, "vocab_size"))

    def draw(column):
        features, places = column  # [B, E], [B]
        output = dataclasses.replace(generated, features=features[:, None], unembedding=matrix)
        logits = output.logits()[:, 0]  # [B, V]
        noise = jax.vmap(lambda key, place: jax.random.gumbel(jax.random.fold_in(key, place), logits.shape[1:]))
        noisy = constrain(logits + noise(keys, places), logical_spec("batch", "vocab_size"))
        return jnp.argmax(noisy, axis=-1).astype(jnp.int32)

    # [B, N, E] -> [N, B, E]
    columns = constrain(generated.features.swapaxes(0, 1), logical_spec(None, "batch")), places.T
    return jax.lax.map(draw, columns, batch_size=max(1, _SAMPLE_CHUNK // len(keys))).T
