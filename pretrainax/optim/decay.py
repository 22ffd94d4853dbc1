"""Selects the parameters to which weight decay applies."""

from collections.abc import Collection

import jax

from pretrainax.sharding.param_paths import PyTree, match_rules

# End of a parameter's path -> its group. The first match wins. The rank of a parameter is no criterion, because the
# scale of a norm has two axes in a stack of layers. The parameters of "none" never decay.
DECAY = (
    (r"bias", "biases"),
    (r"scale", "norms"),
    (r"sinks|router/balance", "none"),
    (r"tagger/(transitions|start|end)|scalar_mix/weights", "none"),
    (r"relative_bias/embedding", "none"),
    (r"\w+_embedding/embedding", "embeddings"),
    (r"kernel", "matrices"),
    (r"lora_(a|b)", "matrices"),
    (r"magnitude|ia3|prompt|prefix|prefix/\w+/\w+", "none"),
)
DECAYED = ("matrices", "embeddings")  # the groups that decay by default, as in BERT and GPT-2


def decay_mask(params: PyTree, groups: Collection[str] = DECAYED) -> PyTree:
    """Builds the weight-decay mask of `params` (arrays or shapes), which is True for parameters that decay.

    Args:
      groups: the groups of `DECAY` that decay.

    Raises:
      ValueError: DECAY has no row for a parameter.
    """
    return jax.tree.map(lambda group: group in groups, match_rules(DECAY, params, "DECAY"))
