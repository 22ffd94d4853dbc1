"""Pretrains EuroBERT with masked language modelling (Boizard et al. 2025, arXiv 2503.05500). Variants: `:210m`,
`:610m`, `:2_1b`; for a laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/eurobert.py:610m --config.mesh.fsdp=64 --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb-edu', streaming=True)"

The run has two phases (section 2.3). The first masks half of the tokens in rows of 2,048. The second masks a tenth in
rows of 8,192, with RoPE base 250,000, while the learning rate decays. Every masked token becomes [MASK]. Source of each
value: `pretrainax recipe --config=eurobert`. The authors' 5 T tokens of 15 languages, mathematics and code come from
several datasets. The command uses their English web text, FineWeb-Edu (Penedo et al. 2024), instead.

Hardware of the authors: 200 k hours of MI250X and MI300A for all sizes.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, Phase, TrainConfig
from pretrainax.data.objectives import MaskedLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupStableDecay
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.eurobert import eurobert

TOKENS, ANNEALING, ROWS, LENGTH, LONG = 5e12, 200e9, 2304, 2048, 8192


def _steps(tokens: float) -> int:
    return round(tokens / (ROWS * LENGTH))


def _masked(rate: float) -> MaskedLM:
    return MaskedLM(rate=rate, mask_fraction=1.0, random_fraction=0.0)


@with_small_sizes
def get_config(variant: str = "210m") -> Experiment:
    model = eurobert(variant or "210m")
    last = Phase(
        share=ANNEALING / TOKENS,
        sequence_length=LONG,
        global_batch_size=ROWS * LENGTH // LONG,
        theta=model.position.theta,
        objective=_masked(0.1),
    )
    model.position.theta = 10_000.0
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=128_256, special_pieces="bert"),
        data=DataConfig(source=PythonDocs(), sequence_length=LENGTH),
        objective=_masked(0.5),
        optimizer=AdamW(
            learning_rate=1e-4,
            b2=0.95,
            epsilon=1e-5,
            weight_decay=0.1,
            clip_norm=1.0,
            decay_norms=True,
            decay_biases=True,
        ),
        schedule=WarmupStableDecay(warmup_steps=2_000, decay_steps=_steps(ANNEALING)),
        train=TrainConfig(steps=_steps(TOKENS), global_batch_size=ROWS, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=8, objective=MaskedLM(rate=0.15)),
        checkpoint=CheckpointConfig(every=1_000),
        phases=(Phase(share=1 - ANNEALING / TOKENS), last),
    )
