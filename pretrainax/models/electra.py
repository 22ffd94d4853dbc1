"""ELECTRA: a masked LM proposes replacements, and the model says of each token whether it was replaced.

Clark et al. 2020 (arXiv 2003.10555), and the embedding sharing of DeBERTa v3 (He et al. 2021, arXiv 2111.09543,
section 3.3). The model is two encoders: the discriminator, which goes on to other tasks, and the generator. They have
one tree of parameters. At its top is the discriminator's, with the paths that it has alone; beside it

    generator/...             what the generator does not share
    embedding_difference/...  added to the shared tables for the discriminator; only where gradients are disentangled

`discriminator` and `generator` take a tree apart into two plain encoders, `join` puts it together. Training reads its
parameters through them too, so that what is exported is what was trained.
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
from pretrainax.layers.sums import added
from pretrainax.models.base import register_model
from pretrainax.models.encoder import Encoder
from pretrainax.models.heads.language_model import LanguageModelOutput
from pretrainax.models.outputs import Outputs
from pretrainax.sharding.arrays import constrain
from pretrainax.sharding.axes import logical_spec
from pretrainax.sharding.param_paths import PyTree

# config.model.generator.share_embeddings -> what the two share. ELECTRA's code has one scope for all that makes an
# embedding; DeBERTa's shares tokens and positions, each plus a difference, and leaves the norm to each.
SHARED = {
    "all": ("token_embedding", "position_embedding", "token_type_embedding", "embedding_norm"),
    "gradient_disentangled": ("token_embedding", "position_embedding"),
}
_AT_ONCE = 4096  # tokens of a batch whose logits over the vocabulary exist at a time when replacements are drawn


def models_of(config: ModelConfig) -> list[ModelConfig]:
    """Returns the models that a config is made of: the one, or a generator and its discriminator."""
    return [config] if config.generator is None else [generator_config(config), discriminator_config(config)]


def discriminator_config(config: ModelConfig) -> ModelConfig:
    """Returns the config of the encoder that goes on to other tasks. A mask decoder is the generator's (DeBERTa v3, in
    the released code)."""
    return dataclasses.replace(copy.deepcopy(config), generator=None, enhanced_mask_decoder=False)


def generator_config(config: ModelConfig) -> ModelConfig:
    """Returns the config of the masked LM. Its embeddings are as wide as the discriminator's, and projected where it is
    narrower."""
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
        **{**heads, "masked_lm_head": True},  # the questions of the other heads are the discriminator's
    )


def discriminator(config: ModelConfig, params: PyTree) -> tuple[ModelConfig, PyTree]:
    """Returns the config and the parameters of the discriminator as an encoder of its own.

    Disentangled (He et al. 2021, section 3.3): its tables are the shared ones, through which none of its gradient goes
    to the generator, plus the difference.
    """
    own = {name: x for name, x in params.items() if name not in ("generator", "embedding_difference")}
    for name, difference in params.get("embedding_difference", {}).items():
        own[name] = jax.tree.map(lambda x, d: jax.lax.stop_gradient(x) + d, params[name], difference)
    return discriminator_config(config), own


def generator(config: ModelConfig, params: PyTree) -> tuple[ModelConfig, PyTree]:
    """Returns the config and the parameters of the generator as an encoder of its own."""
    shared = {name: params[name] for name in _shared(config) if name in params}
    return generator_config(config), {**shared, **params["generator"]}


def join(config: ModelConfig, discriminator: PyTree, generator: PyTree) -> PyTree:
    """Returns the tree of `config` from the parameters that `discriminator` and `generator` gave of its two encoders.

    Raises:
      UserError: embeddings that `config` shares and that are not the same in both.
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
                f"generator and discriminator differ in {name}, which config.model.generator.share_embeddings="
                f"{_generator_of(config).share_embeddings!r} says they share: not pretrained together"
            )
    return joined


def _generator_of(config: ModelConfig) -> Generator:
    """Returns what `config` says of the generator, for a model that has one."""
    assert config.generator is not None
    return config.generator


def _shared(config: ModelConfig) -> tuple[str, ...]:
    return SHARED[_generator_of(config).share_embeddings]


def _disentangled(config: ModelConfig) -> bool:
    return _generator_of(config).share_embeddings == "gradient_disentangled"


@dataclasses.dataclass(frozen=True)
@register_model
class Electra:
    """Used like the other models, on batches of masked language modelling.

    The outputs are the generator's and the discriminator's, with the truth about what was replaced. The replacements
    come from the stream "sample" of `rngs`. Where there is none, as in evaluation, those of a row follow from its
    tokens: the same row always gets the same ones, whatever else is in its batch.
    """

    config: ModelConfig
    compute: Compute

    @staticmethod
    def is_in(config: ModelConfig) -> bool:
        return config.generator is not None

    @staticmethod
    def flops(config: ModelConfig, inputs: int, targets: int) -> None:
        """Returns None: both models have blocks."""

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
            return cast(Outputs, outputs)  # a tuple, as Flax types it too, only with `mutable`

        generated = run(1, generator, batch)
        if not has_loss(batch):  # nobody asks for a loss: what the generator says
            return generated
        tokens, replaced = replace(generated.heads["lm"], batch, sample)
        found = run(0, discriminator, {**batch, "tokens": tokens})
        told = found.heads["replaced"].replace(replaced=replaced, weight=_generator_of(self.config).loss_weight)
        heads = {**generated.heads, **found.heads, "replaced": told}
        return Outputs(heads, added(generated.sums, found.sums))


def _folded(keys: PyTree, number: int) -> PyTree:
    """Returns keys for encoder `number`: two of one shape would else drop the same activations."""
    return jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)


def replace(
    generated: LanguageModelOutput, batch: Batch, sample: Optional[jax.Array] = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the text as the generator writes it, and where that is not the original.

    Each token that is predicted is drawn from its softmax; all others are the originals. A draw that hits the original
    is an original (Clark et al. 2020, section 2). No gradient goes through a draw.

    Args:
      generated: the predictions [B, N], N = K where the batch has masked_positions [B, K], else T.
      sample: a key; without one, that of a row is made of the sum of its tokens.

    Returns:
      Tokens [B, T] int32, and [B, T] bool.
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
        places = jnp.where(predicted, batch["masked_positions"], length)  # slots that a row does not need have 0
        put = jax.vmap(lambda row, place, values: row.at[place].set(values, mode="drop"))
        fill = lambda values: put(tokens, places, values)  # noqa: E731
    else:
        places = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
        fill = lambda values: jnp.where(predicted, values, tokens)  # noqa: E731
    originals, written = fill(batch["targets"]), fill(_draw(generated, keys, places))
    return written, written != originals


def _draw(generated: LanguageModelOutput, keys: jax.Array, places: jax.Array) -> jax.Array:
    """Draws a token from the softmax of each prediction, [B, N] int32: the largest of logits + Gumbel noise is one.

    The noise follows from the row's key and the token's place [B, N]. It costs the logits once more, a third of what
    their loss costs, and a random number for each; they exist for some tokens at a time, and are the same however many.
    """
    generated = jax.lax.stop_gradient(generated)
    matrix = constrain(generated.unembedding.astype(generated.features.dtype), logical_spec(None, "vocab_size"))

    def draw(column):
        features, places = column  # [B, E], [B]
        said = dataclasses.replace(generated, features=features[:, None], unembedding=matrix)
        logits = said.logits()[:, 0]  # [B, V]
        noise = jax.vmap(lambda key, place: jax.random.gumbel(jax.random.fold_in(key, place), logits.shape[1:]))
        noisy = constrain(logits + noise(keys, places), logical_spec("batch", "vocab_size"))
        return jnp.argmax(noisy, axis=-1).astype(jnp.int32)

    # [B, N, E] -> [N, B, E]
    columns = constrain(generated.features.swapaxes(0, 1), logical_spec(None, "batch")), places.T
    return jax.lax.map(draw, columns, batch_size=max(1, _AT_ONCE // len(keys))).T
