"""Pretrains ModernBERT with masked language modelling (Warner et al. 2024, arXiv 2412.13663). Variants: `:base :large`;
for a laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/modernbert_base.py --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb-edu', streaming=True)" --config.train.accumulate=8

The run has the phases of the paper (section 2.2.2, table 3). First, rows of 1,024 tokens at a constant learning rate;
for large, at a tenth of it after 900 B tokens. Then rows of 8,192 tokens at a lower learning rate, with RoPE base
160,000 in global layers. Last, the same rows while the learning rate decays. A batch of long rows has as many tokens as
a batch of short ones. In all phases, validation has rows of 1,024 tokens and masks 15 % of them, as in the released
code, so its loss is comparable with other masked language models. Source of each value, and omissions:
`pretrainax recipe --config=modernbert_base`.

The authors' mixture of web text, papers and code is not public; the command uses FineWeb-Edu (Penedo et al. 2024),
1.3 T tokens of web text, instead.

Hardware of the paper: 8 H100. Expected after fine-tuning: GLUE 88.4 (base), 90.4 (large) (table 1, dev set).
"""

import dataclasses

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, Phase, TrainConfig
from pretrainax.data.objectives import MaskedLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import StableAdamW, WarmupStableDecay
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.modernbert import modernbert
from pretrainax.zoo.variants import pick

LENGTH, LONG = 1024, 8192
# variant -> (peak learning rate, weight decay, batch size, warmup tokens)
RECIPES = {"base": (8e-4, 1e-5 / 8e-4, 4608, 3e9), "large": (5e-4, 1e-5 / 5e-4, 4928, 2e9)}
# variant -> (tokens, changed fields) of each phase
PHASES = {
    "base": ((1.719e12, {}), (250e9, {"learning_rate": 3e-4}), (50e9, {"learning_rate": 3e-4})),
    "large": (
        (900e9, {}),
        (819e9, {"learning_rate": 5e-5}),
        (250e9, {"learning_rate": 5e-5}),
        (50e9, {"learning_rate": 5e-5}),
    ),
}


@with_small_sizes
def get_config(variant: str = "base") -> Experiment:
    variant = variant or "base"
    learning_rate, weight_decay, batch_size, warmup = pick("modernbert_base", variant, RECIPES)
    model = modernbert(variant)
    long_rows = {
        "sequence_length": LONG,
        "global_batch_size": batch_size * LENGTH // LONG,
        "theta": model.position.theta,
    }
    model.position.theta = model.position.local_theta
    total = sum(tokens for tokens, _ in PHASES[variant])
    *short, extension, decay = [Phase(share=tokens / total, **changes) for tokens, changes in PHASES[variant]]

    def steps(tokens):
        return round(tokens / (batch_size * LENGTH))

    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=50_285, special_pieces="bert"),  # the model pads the vocabulary to 50,368 rows
        data=DataConfig(source=PythonDocs(), sequence_length=LENGTH),
        objective=MaskedLM(rate=0.3, mask_fraction=0.8, random_fraction=0.1),
        optimizer=StableAdamW(learning_rate=learning_rate, b2=0.98, epsilon=1e-6, weight_decay=weight_decay),
        schedule=WarmupStableDecay(warmup_steps=steps(warmup), decay_steps=steps(50e9), final_fraction=0.001),
        train=TrainConfig(steps=steps(total), global_batch_size=batch_size),
        evaluate=EvaluateConfig(every=4_000, batches=4, objective=MaskedLM(rate=0.15)),
        checkpoint=CheckpointConfig(every=4_000),
        phases=(*short, *(dataclasses.replace(phase, **long_rows) for phase in (extension, decay))),
    )
