"""Pretrains DeepSeekMoE, V2 and V3 with causal language modelling. Variants: `:moe_16b`, `:v2_lite`, `:v2`, `:v3`.

    python -m pretrainax.main --config=configs/deepseek.py:v2_lite --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)" --config.mesh.fsdp=32 --config.mesh.expert=8

Dai et al. 2024, arXiv 2401.06066; DeepSeek-AI 2024, arXiv 2405.04434 and 2412.19437. Rows have 4,096 tokens, as in the
authors' pretraining. The authors extended the context with YaRN afterwards; the zoo models (`deepseek_v3`,
`deepseek_r1`) have this extension. The batch size is the final size of the authors' batch size ramp. V3 also predicts
the token after the next one; the weight of this loss stays at its initial value. Source of each value:
`pretrainax recipe --config=deepseek:v3`. The dataset is not public, and half of it is Chinese; the command uses FineWeb
(Penedo et al. 2024), English web text, instead.

| variant | parameters | active per token | tokens | MMLU, 5-shot, of the released model |
| --- | --- | --- | --- | --- |
| moe_16b | 16.4 B | 2.8 B | 2 T | 45.0 |
| v2_lite | 15.7 B | 2.7 B | 5.7 T | 58.3 |
| v2 | 235.7 B | 21.4 B | 8.1 T | 78.5 |
| v3 | 671.0 B | 37.6 B | 14.8 T | 87.1 |
"""

from pretrainax.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Experiment,
    MultiTokenPrediction,
    RotaryPositions,
    TrainConfig,
)
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, Schedule, WarmupStableDecay, WarmupSteps
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.deepseek import deepseek, set_balance

CONTEXT = 4096
# variant -> (tokens, rows per batch, peak learning rate)
RUNS = {
    "moe_16b": (2e12, 4608, 4.2e-4),
    "v2_lite": (5.7e12, 4608, 4.2e-4),
    "v2": (8.1e12, 9216, 2.4e-4),
    "v3": (14.8e12, 15_360, 2.2e-4),
}


def get_config(variant: str = "v3") -> Experiment:
    variant = variant or "v3"
    model = deepseek(variant)
    model.position = RotaryPositions(CONTEXT, interleaved=variant != "moe_16b")
    model.init_stddev = 0.006
    if variant == "v3":
        model.multi_token = MultiTokenPrediction(weight=0.3)
        set_balance(model, 0.0001)  # also for the experts of the multi-token head
    tokens, rows, rate = RUNS[variant]
    steps = round(tokens / (rows * CONTEXT))
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=128_000 if variant == "v3" else 100_000),  # the model has a few more rows
        data=DataConfig(source=PythonDocs(), sequence_length=CONTEXT),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=rate, b2=0.95, weight_decay=0.1, clip_norm=1.0),
        schedule=_schedule(variant, steps),
        train=TrainConfig(steps=steps, global_batch_size=rows, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )


def _schedule(variant: str, steps: int) -> Schedule:
    if variant == "v3":  # the first 10 T tokens at the peak
        return WarmupStableDecay(warmup_steps=2_000, decay_steps=round(steps * 4.8 / 14.8), final_fraction=0.1)
    return WarmupSteps(warmup_steps=2_000, shares=(0.6, 0.9) if variant == "v2" else (0.8, 0.9))
