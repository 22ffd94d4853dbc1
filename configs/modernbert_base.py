"""ModernBERT by masked language modelling (Warner et al. 2024, arXiv 2412.13663): `:base :large`, and for
a laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/modernbert_base.py --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb-edu', streaming=True)" --config.train.accumulate=8

The first phase of the paper (section 2.2.2, table 3): 1.7 T tokens at a length of 1,024, of which 30 % are predicted,
at a constant rate after 3 B (base) or 2 B (large) tokens of warmup. All layers turn at base 10,000 in it; the second
phase, 250 B tokens at 8,192, sets `model.position.theta` of the global ones to the preset's 160,000. Here the rate
falls over the last 50 B tokens, as it does at the end of the paper's second phase. Validation asks for 15 % of the
tokens, as in the released code, so that its loss compares with those of other masked language models.

The authors' mixture of web text, papers and code is not public; FineWeb-Edu (Penedo et al. 2024) stands in for it,
1.3 T tokens of web text.

Left out: StableAdamW (AdamW with clipped gradients stands in), the growth of the batch, the fall of large's rate to a
tenth after 900 B tokens, dropout of 0.1 after attention, base's weights as the start of large's.

Hardware of the paper: 8 H100. Expected after fine-tuning: GLUE 88.4 (base), 90.4 (large) (table 1, dev set).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import MaskedLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupStableDecay
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.modernbert import modernbert
from pretrainax.zoo.variants import pick

LENGTH = 1024
# variant -> (peak learning rate, weight decay, batch, tokens of warmup)
RECIPES = {"base": (8e-4, 1e-5, 4608, 3e9), "large": (5e-4, 1e-5, 4928, 2e9)}


@with_small_sizes
def get_config(variant: str = "base") -> Experiment:
    variant = variant or "base"
    learning_rate, weight_decay, batch_size, warmup = pick("modernbert_base", variant, RECIPES)
    model = modernbert(variant)
    model.position.theta = model.position.local_theta

    def steps(tokens):
        return round(tokens / (batch_size * LENGTH))

    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=50_285, special_pieces="bert"),  # the model pads them to 50,368 rows
        data=DataConfig(source=PythonDocs(), sequence_length=LENGTH),
        objective=MaskedLM(rate=0.3, mask_fraction=0.8, random_fraction=0.1),
        optimizer=AdamW(learning_rate=learning_rate, b2=0.98, epsilon=1e-6, weight_decay=weight_decay, clip_norm=1.0),
        schedule=WarmupStableDecay(warmup_steps=steps(warmup), decay_steps=steps(50e9)),
        train=TrainConfig(steps=steps(1.719e12), global_batch_size=batch_size),
        evaluate=EvaluateConfig(every=4_000, batches=4, objective=MaskedLM(rate=0.15)),
        checkpoint=CheckpointConfig(every=4_000),
    )
