"""The parameters that weight decay pulls to zero."""

from pretrainax.sharding.param_paths import PyTree, match_rules

# The end of a parameter's path -> does weight decay pull it to zero? First match wins. By path and not by rank: the
# scale of a norm has two axes once layers are stacked. Embeddings decay, as in BERT's and GPT-2's training.
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
    """Returns `params` (arrays or shapes) with True where weight decay applies.

    Raises:
      ValueError: parameters that DECAY does not cover.
    """
    return match_rules(DECAY, params, "DECAY")
