"""Scales a paper's run down to a laptop, with the same architecture, objective and optimizer.

`configs/gpt2.py:tiny` is `configs/gpt2.py` with fewer and narrower layers, a vocabulary of 8,192 tokens learned from
the corpus (4,096 for BERT and ELECTRA), shorter sequences and fewer steps. After export, transformers loads the small
model with the same class as the large one. Numbers of parameters:

| | layers | width | GPT-2 | LLaMA | BERT | ModernBERT | T5 |
| --- | --- | --- | --- | --- | --- | --- | --- |
| tiny | 2 | 128 | 1.5 M | 2.4 M | 1.0 M | 1.4 M | 2.9 M |
| mini | 4 | 256 | 5.3 M | 6.8 M | 4.4 M | 4.8 M | 10.6 M |
| midi | 6 | 384 | 13.9 M | 15.1 M | 12.6 M | 12.2 M | 27.6 M |
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from pretrainax.config import AUTO, Experiment, UserError
from pretrainax.optim import WarmupCosine, WarmupStableDecay

VOCABULARY = 8192  # size of the vocabulary; 1 MB of text is enough to learn it


class Size(NamedTuple):
    """The dimensions of a small model, and the sequence length, number of steps and learning rate of its run."""

    num_layers: int  # layers of each stack
    d_model: int  # heads have width 64; the feed-forward has width 4 * d_model, or 2 * d_model if gated
    sequence_length: int
    steps: int  # number of steps, with 32 rows per step
    learning_rate: float  # not used by optimizers that scale updates by the size of each matrix


# tiny and mini are two of BERT's small shapes (Turc et al. 2019, arXiv 1908.08962, table 1); midi is the shape of
# nanoGPT's character model. No published model is called "midi"; "small" models of T5 and ELECTRA have other sizes.
SIZES = {
    "tiny": Size(2, 128, 128, 1_000, 1e-3),
    "mini": Size(4, 256, 256, 2_000, 1e-3),
    "midi": Size(6, 384, 256, 5_000, 5e-4),
}


def with_small_sizes(get_config: Callable[[str], Experiment]) -> Callable[[str], Experiment]:
    """Wraps `get_config` so that it also accepts the variants "tiny", "mini" and "midi" (SIZES).

    These variants are the default run of `get_config`, scaled down.
    """

    @functools.wraps(get_config)
    def get_config_or_small(variant: str = "") -> Experiment:
        if variant in SIZES:
            return scale_down(get_config(""), SIZES[variant])
        try:
            return get_config(variant)
        except UserError as e:
            raise UserError(f"{e}; small variants for a laptop: {', '.join(SIZES)}") from e

    return get_config_or_small


def scale_down(run: Experiment, size: Size) -> Experiment:
    """Scales a run's config down to the given size in place, removes its training phases, and returns it.

    Args:
      run: the config of a paper's run.
    """
    model, interval = run.model, size.steps // 10
    model.parts = tuple(part.scaled(size.d_model, model.d_model) for part in model.parts)
    model.vocab_size, model.num_layers, model.d_model = AUTO, size.num_layers, size.d_model
    model.d_ff, model.num_heads = (2 if model.gated else 4) * size.d_model, size.d_model // 64
    model.num_kv_heads = model.head_dim = model.decoder = None
    if model.position.max_length is not None:
        model.position.max_length = AUTO
    run.tokenizer.vocab_size = VOCABULARY
    run.data.sequence_length = size.sequence_length
    if not run.optimizer.is_scale_invariant:  # a relative learning rate suits every size
        run.optimizer.learning_rate = size.learning_rate
    run.schedule.warmup_steps = interval
    if isinstance(run.schedule, WarmupStableDecay):
        run.schedule.decay_steps = 2 * interval
    if isinstance(run.schedule, WarmupCosine):
        run.schedule.cosine_steps = None
    if run.schedule.anneal_steps:
        run.schedule.anneal_steps = interval
    run.train.steps, run.train.global_batch_size, run.train.remat = size.steps, 32, "none"
    run.train.log_every, run.evaluate.every, run.checkpoint.every = interval // 5, interval, interval
    run.evaluate.batches, run.phases = 20, ()
    if model.family == "encoder" and model.norm_at == "post":
        _adapt_post_norm_encoder(run)
    return run


def _adapt_post_norm_encoder(run: Experiment) -> None:
    """Changes a small encoder with post-norm (BERT) so that it learns from context within 1,000 steps.

    With the paper's values, `bert_base:tiny` predicts from token frequencies only. After 1,000 steps, its loss at
    [MASK] is 0.015 nats below the loss of the frequencies; with the values here, it is 0.85 nats below (one seed each).
    The attention of a narrow model is too weak at the start, because a layer's output has a standard deviation of
    init_stddev * sqrt(width): 0.55 in BERT base, but 0.23 at a width of 128.
    """
    model = run.model
    model.init_stddev = round(0.02 * (768 / model.d_model) ** 0.5, 3)  # the output is as large as in BERT base
    model.dropout_rate = model.attention_dropout_rate = 0.0  # the run reads its text about once
    run.tokenizer.vocab_size = VOCABULARY // 2  # more examples of each token
    run.optimizer.learning_rate *= 2
    run.schedule.warmup_steps *= 2  # post-norm needs a long warmup (Xiong et al. 2020, arXiv 2002.04745)
    if (generator := model.generator) is not None:  # half the width (Clark et al. 2020, section 3.2: 1/4 to 1/2)
        model.embedding_dim, width = None, model.d_model // 2
        generator.num_layers, generator.d_model, generator.d_ff = model.num_layers, width, 4 * width
        generator.num_heads = width // 64
