"""Pretrains LLaMA 1, 2, 3 and 3.1 with causal language modelling. Variants: `:1_7b` … `:1_65b`, `:2_7b` … `:2_70b`,
`:3_8b` … `:3_1_405b`; for a laptop `:tiny :mini :midi` (of LLaMA 3).

    python -m pretrainax.main --config=configs/llama.py:3_8b --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)" --config.mesh.fsdp=64 --config.train.accumulate=2

Touvron et al. 2023, arXiv 2302.13971 and 2307.09288; Grattafiori et al. 2024, arXiv 2407.21783. Source of each value:
`pretrainax recipe --config=llama:3_8b`. The authors' dataset is not public; the command uses FineWeb (Penedo et al.
2024), 15 T tokens of web text, instead.

LLaMA 3 doubles its batch size twice and its row length once (section 3.4.1), in three phases. With
`--config.phases="()"`, both are constant.

| variant | tokens | GPU hours of the authors | MMLU, 5-shot |
| --- | --- | --- | --- |
| 1_7b, 1_13b, 1_33b, 1_65b | 1.0, 1.0, 1.4, 1.4 T | 82 k, 135 k, 530 k, 1,022 k A100 | 35.1, 46.9, 57.8, 63.4 |
| 2_7b, 2_13b, 2_70b | 2 T | 184 k, 369 k, 1,720 k A100 | 45.3, 54.8, 68.9 |
| 3_8b, 3_70b | 15 T | 1.3 M, 6.4 M H100 | 66.6, 79.5 |
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, Phase, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import BPE, ByteBPE
from pretrainax.zoo.llama import llama
from pretrainax.zoo.variants import pick

BATCH_TOKENS = 4 * 2**20
# LLaMA 3, for each phase but the last: (tokens of the run at its end, tokens per step, tokens per row)
RAMP = ((252e6, BATCH_TOKENS, 4096), (2.87e12, 2 * BATCH_TOKENS, 8192))
# variant -> (peak learning rate, tokens)
RECIPES = {
    "1_7b": (3.0e-4, 1.0e12),
    "1_13b": (3.0e-4, 1.0e12),
    "1_33b": (1.5e-4, 1.4e12),
    "1_65b": (1.5e-4, 1.4e12),
    "2_7b": (3.0e-4, 2.0e12),
    "2_13b": (3.0e-4, 2.0e12),
    "2_70b": (1.5e-4, 2.0e12),
    "3_8b": (3.0e-4, 15e12),
    "3_70b": (1.5e-4, 15e12),
    "3_1_8b": (3.0e-4, 15e12),
    "3_1_70b": (1.5e-4, 15e12),
    "3_1_405b": (8.0e-5, 15.6e12),
}


@with_small_sizes
def get_config(variant: str = "3_8b") -> Experiment:
    variant = variant or "3_8b"
    learning_rate, tokens = pick("configs/llama.py", variant, RECIPES)  # 3.2 has none: it was pruned from 3.1
    is_3 = variant[0] == "3"
    context = {"1": 2048, "2": 4096, "3": 8192}[variant[0]]
    batch_tokens = 4 * BATCH_TOKENS if is_3 else BATCH_TOKENS
    steps, phases = _ramp(tokens, batch_tokens) if is_3 else (round(tokens / batch_tokens), ())
    return Experiment(
        model=llama(variant),
        tokenizer=ByteBPE(vocab_size=128_000) if is_3 else BPE(vocab_size=32_000),
        data=DataConfig(source=PythonDocs(), sequence_length=context),
        objective=CausalLM(mask_documents=is_3),  # LLaMA 3: no attention across documents (section 3.2)
        optimizer=AdamW(learning_rate=learning_rate, b2=0.95, epsilon=1e-5, weight_decay=0.1, clip_norm=1.0),
        schedule=(
            WarmupCosine(warmup_steps=8_000, final_fraction=0.01, cosine_steps=1_200_000)
            if is_3
            else WarmupCosine(warmup_steps=2_000, final_fraction=0.1)
        ),
        train=TrainConfig(steps=steps, global_batch_size=batch_tokens // context, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
        phases=phases,
    )


def _ramp(tokens: float, batch_tokens: int) -> tuple[int, tuple[Phase, ...]]:
    """Returns the steps and the phases of a run; batch_tokens: tokens per step in the last phase."""
    starts = [0.0, *(stop for stop, _, _ in RAMP)]
    lengths = [round((stop - start) / batch) for start, (stop, batch, _) in zip(starts[:-1], RAMP, strict=True)]
    steps = sum(lengths) + round((tokens - starts[-1]) / batch_tokens)
    ramp = (
        Phase(share=length / steps, sequence_length=row, global_batch_size=batch // row)
        for length, (_, batch, row) in zip(lengths, RAMP, strict=True)
    )
    return steps, (*ramp, Phase())
