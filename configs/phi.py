"""Phi-1, 1.5 and 2 by causal language modelling: `:1`, `:1_5`, `:2`, and for a laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/phi.py:1_5 --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb-edu', streaming=True)" --config.mesh.fsdp=8

Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463; Javaheripi and Bubeck 2023, a post of
Microsoft Research. Their text, textbooks that a language model wrote and chosen code and web text, is not public;
FineWeb-Edu (Penedo et al. 2024), web text chosen for what it teaches, stands in for it. Each number:
`pretrainax recipe --config=phi`.

| variant | tokens | hours of the authors | score |
| --- | --- | --- | --- |
| 1 | 76 B | 4 days on 8 A100 | HumanEval 29, and 50.6 after exercises |
| 1_5 | 150 B | 1.5 k A100 | WinoGrande 73.4 |
| 2 | 1.4 T | 14 days on 96 A100 | MMLU 56.7 |
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupConstant, WarmupLinear
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.phi import phi

CONTEXT = 2048
# variant -> (rows of a batch, steps)
RUNS = {
    "1": (1024, 36_000),
    "1_5": (2048, round(150e9 / (2048 * CONTEXT))),
    "2": (2048, round(1.4e12 / (2048 * CONTEXT))),
}


@with_small_sizes
def get_config(variant: str = "1_5") -> Experiment:
    variant = variant or "1_5"
    model = phi(variant)
    rows, steps = RUNS[variant]
    if variant == "1":
        optimizer = AdamW(learning_rate=1e-3, b2=0.98, epsilon=1e-7, weight_decay=0.1, clip_norm=1.0)
        schedule = WarmupLinear(warmup_steps=750)
    else:
        optimizer = AdamW(learning_rate=2e-4, b2=0.98, epsilon=1e-7, weight_decay=0.1, clip_norm=1.0)
        schedule = WarmupConstant(warmup_steps=0)
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=50_295),
        data=DataConfig(source=PythonDocs(), sequence_length=CONTEXT),
        objective=CausalLM(),
        optimizer=optimizer,
        schedule=schedule,
        train=TrainConfig(steps=steps, global_batch_size=rows, log_every=10, remat="block"),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
