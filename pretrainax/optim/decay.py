"""Selects the parameters to which weight decay applies."""

from pretrainax.sharding.param_paths import PyTree, match_rules

# End of a parameter's path -> True if weight decay applies. The first match wins. The rank of a parameter is no
# criterion, because the scale of a norm has two axes in a stack of layers. Embeddings decay, as in BERT and GPT-2.
DECAY = (
    (r"bias|scale|sinks|router/balance", False),
    (r"tagger/(transitions|start|end)|scalar_mix/weights", False),
    (r"relative_bias/embedding", False),
    (r"\w+_embedding/embedding", True),
    (r"kernel", True),
    (r"lora_(a|b)", True),
    (r"magnitude|ia3|prompt|prefix|prefix/\w+/\w+", False),
)


def decay_mask(params: PyTree) -> PyTree:
    """Builds the weight-decay mask of `params` (arrays or shapes), which is True for parameters that decay.

    Raises:
      ValueError: DECAY has no row for a parameter.
    """
    return match_rules(DECAY, params, "DECAY")
