"""ELECTRA: a generator (a masked LM) replaces tokens, and a discriminator predicts which tokens were replaced.

Sources: Clark et al. 2020 (arXiv 2003.10555), and for embedding sharing DeBERTa v3 (He et al. 2021, arXiv 2111.09543,
section 3.3). The model consists of two encoders: the discriminator, which is later fine-tuned, and the generator. Both
are in one parameter tree. The parameters of the discriminator have the same paths as in an encoder. The tree also has

    generator/...             the parameters that the generator does not share
    embedding_difference/...  added to the shared tables for the discriminator, with gradient disentanglement only

`discriminator` and `generator` extract the parameters of one encoder. `join` merges the parameters of two encoders into
one tree. Training also uses these functions, so exported parameters equal the parameters used in training.
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
from pretrainax.models.heads.logit_passes import recomputed_logits
from pretrainax.models.heads.logit_products import logit_products
from pretrainax.models.heads.vocabulary_loss import cast_unembedding
from pretrainax.models.outputs import Outputs
from pretrainax.models.spread import HIDDEN_SPREAD
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import logical_spec
from pretrainax.sharding.param_paths import PyTree

# The shared modules for each value of config.model.generator.share_embeddings. ELECTRA's code shares all embedding
# modules. DeBERTa's code shares token and position tables, to which the discriminator adds a difference. Each
# encoder has its own norm.
SHARED = {
    "all": ("token_embedding", "position_embedding", "token_type_embedding", "embedding_norm"),
    "gradient_disentangled": ("token_embedding", "position_embedding"),
}
_SAMPLE_CHUNK = 4096  # number of tokens whose vocabulary logits are in memory during sampling


def component_configs(config: ModelConfig) -> list[ModelConfig]:
    """Returns [generator config, discriminator config] for ELECTRA, and [config] for any other model."""
    return [config] if config.generator is None else [generator_config(config), discriminator_config(config)]


def discriminator_config(config: ModelConfig) -> ModelConfig:
    """Builds the config of the discriminator, an encoder.

    Only the generator has the enhanced mask decoder, as in the released code of DeBERTa v3.
    """
    return dataclasses.replace(copy.deepcopy(config), generator=None, enhanced_mask_decoder=False)


def generator_config(config: ModelConfig) -> ModelConfig:
    """Builds the config of the generator, an encoder with a masked-LM head.

    The generator's embeddings have the same width as the discriminator's. If the generator's `d_model` differs from
    this width, a linear layer projects the embeddings.
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
    """Extracts the config and the parameters of the discriminator, as a separate encoder.

    With gradient disentanglement (He et al. 2021, section 3.3), the embedding tables of the discriminator are the
    shared tables plus the difference, and no gradient of the discriminator reaches the shared tables.

    Args:
      config: the config of the ELECTRA model.
      params: the parameter tree of the ELECTRA model.
    """
    encoder_params = {name: x for name, x in params.items() if name not in ("generator", "embedding_difference")}
    for name, difference in params.get("embedding_difference", {}).items():
        encoder_params[name] = jax.tree.map(lambda x, d: jax.lax.stop_gradient(x) + d, params[name], difference)
    return discriminator_config(config), encoder_params


def generator(config: ModelConfig, params: PyTree) -> tuple[ModelConfig, PyTree]:
    """Extracts the config and the parameters of the generator, as a separate encoder."""
    shared_params = {name: params[name] for name in _shared_modules(config) if name in params}
    return generator_config(config), {**shared_params, **params["generator"]}


def join(config: ModelConfig, discriminator: PyTree, generator: PyTree) -> PyTree:
    """Merges the parameters of a discriminator and a generator into the parameter tree of an ELECTRA model.

    Raises:
      UserError: `config` shares an embedding module whose parameters differ between the two encoders.
    """
    shared_names = [name for name in _shared_modules(config) if name in discriminator and name in generator]
    params = dict(discriminator)
    params["generator"] = {name: x for name, x in generator.items() if name not in shared_names}
    if _is_disentangled(config):
        subtract = lambda a, b: a - b  # noqa: E731
        differences = {name: jax.tree.map(subtract, discriminator[name], generator[name]) for name in shared_names}
        return {**params, **{name: generator[name] for name in shared_names}, "embedding_difference": differences}
    for name in shared_names:
        if not jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), discriminator[name], generator[name])):
            raise UserError(
                f"generator and discriminator were not pretrained together: they differ in {name}, but "
                f"config.model.generator.share_embeddings={_generator_of(config).share_embeddings!r} shares it"
            )
    return params


def _generator_of(config: ModelConfig) -> Generator:
    """Returns `config.generator`, which must not be None."""
    assert config.generator is not None
    return config.generator


def _shared_modules(config: ModelConfig) -> tuple[str, ...]:
    return SHARED[_generator_of(config).share_embeddings]


def _is_disentangled(config: ModelConfig) -> bool:
    return _generator_of(config).share_embeddings == "gradient_disentangled"


@dataclasses.dataclass(frozen=True)
@register_model
class Electra:
    """A generator and a discriminator with the interface `AnyModel`, for masked-language-modeling batches.

    The outputs contain the heads of both encoders and the mask of replaced tokens. `rngs["sample"]` is the random key
    for sampling replacements. Without this key, as in evaluation, each row's key is derived from its tokens, so that a
    row gets the same replacements in any batch.
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
        def init_encoder(index, config):
            encoder = Encoder(config, self.compute)
            return encoder.init(_fold_keys(rngs, index), batch, deterministic=deterministic)["params"]

        params = init_encoder(0, discriminator_config(self.config))
        generator_params = init_encoder(1, generator_config(self.config))
        shared_names = [name for name in _shared_modules(self.config) if name in generator_params and name in params]
        params = {**params, "generator": {name: x for name, x in generator_params.items() if name not in shared_names}}
        if _is_disentangled(self.config):
            params["embedding_difference"] = {name: jax.tree.map(jnp.zeros_like, params[name]) for name in shared_names}
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
        sample_key = rngs.pop("sample", None)

        def run(index, extract, batch) -> Outputs:
            config, params = extract(self.config, variables["params"])
            encoder, keys = Encoder(config, self.compute), _fold_keys(rngs, index)
            outputs = encoder.apply({"params": params}, batch, deterministic=deterministic, rngs=keys)
            return cast(Outputs, outputs)  # Flax's type includes a tuple, which needs `mutable`

        generator_outputs = run(1, generator, batch)
        if not has_loss(batch):  # without a loss, only the generator runs
            return generator_outputs
        tokens, replaced = sample_replacements(generator_outputs.heads["lm"], batch, sample_key)
        discriminator_outputs = run(0, discriminator, {**batch, "tokens": tokens})
        replaced_output = discriminator_outputs.heads["replaced"].replace(
            replaced=replaced, weight=_generator_of(self.config).loss_weight
        )
        heads = {**generator_outputs.heads, **discriminator_outputs.heads, "replaced": replaced_output}
        generator_sums = dict(generator_outputs.sums)
        if HIDDEN_SPREAD in generator_sums:  # one of the two encoders may have collapsed
            generator_sums[f"generator_{HIDDEN_SPREAD}"] = generator_sums.pop(HIDDEN_SPREAD)
        return Outputs(heads, add_sums(generator_sums, discriminator_outputs.sums))


def _fold_keys(keys: PyTree, number: int) -> PyTree:
    """Derives the random keys of encoder `number` from `keys` (0: discriminator, 1: generator).

    With equal keys, two encoders of the same shape would use the same dropout masks.
    """
    return jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)


def sample_replacements(
    generated: LanguageModelOutput, batch: Batch, sample: Optional[jax.Array] = None
) -> tuple[jax.Array, jax.Array]:
    """Samples the generator's replacements for a batch, and computes the mask of replaced tokens.

    At the predicted positions, tokens are sampled from the generator's softmax. All other tokens are unchanged. A
    sample that equals the original token counts as original (Clark et al. 2020, section 2). Samples have no gradient.

    Args:
      generated: the predictions [B, N]; N = K if the batch has masked_positions [B, K], else T.
      sample: a random key. If None, each row's key is derived from the sum of its token ids.

    Returns:
      The tokens with replacements, [B, T] int32, and the mask, [B, T] bool.
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
        positions = jnp.where(predicted, batch["masked_positions"], length)  # unused slots have 0; T is dropped
        scatter = jax.vmap(lambda row, position, values: row.at[position].set(values, mode="drop"))
        replace_predicted = lambda values: scatter(tokens, positions, values)  # noqa: E731
    else:
        positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
        replace_predicted = lambda values: jnp.where(predicted, values, tokens)  # noqa: E731
    originals, sampled_tokens = (
        replace_predicted(batch["targets"]),
        replace_predicted(_sample_tokens(generated, keys, positions)),
    )
    return sampled_tokens, sampled_tokens != originals


def _sample_tokens(generated: LanguageModelOutput, keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Samples a token from each prediction's softmax as the argmax of logits plus Gumbel noise; returns [B, N] int32.

    Sampling recomputes the logits, which costs a third as much as their loss, and draws a random number for each logit.
    Only the logits of one chunk of tokens are in memory at a time. The chunk size does not affect the samples.

    Args:
      keys: a random key for each row, [B].
      positions: [B, N], the position of each prediction in its row. The noise depends on the key and this position.
    """
    generated = jax.lax.stop_gradient(generated)
    bias, cap, dtype = generated.bias, generated.logit_cap, generated.features.dtype
    vocabulary = generated.unembedding.shape[1]
    matrix = cast_unembedding(generated.unembedding, dtype, keeps_mean=cap is not None)  # as in the loss
    matrix = constrain(matrix, logical_spec(None, "vocab_size"))

    def sample_column(column):
        features, positions = column  # [B, E], [B]
        products = logit_products(features[:, None], matrix, products="")
        logits = recomputed_logits(products, vocabulary, bias, cap)[:, 0]  # [B, V]
        noise = jax.vmap(lambda key, position: jax.random.gumbel(jax.random.fold_in(key, position), logits.shape[1:]))
        noisy = constrain(logits + noise(keys, positions), logical_spec("batch", "vocab_size"))
        return jnp.argmax(noisy, axis=-1).astype(jnp.int32)

    # [B, N, E] -> [N, B, E]
    columns = constrain(generated.features.swapaxes(0, 1), logical_spec(None, "batch")), positions.T
    return jax.lax.map(sample_column, columns, batch_size=max(1, _SAMPLE_CHUNK // len(keys))).T
