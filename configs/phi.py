"""Pretrains Phi with causal language modelling. Variants: `:1`, `:1_5`, `:2`, `:3_3_8b`, `:3_14b`, `:4_14b`; for a
laptop `:tiny :mini :midi` (of Phi-1.5).

    python -m pretrainax.main --config=configs/phi.py:1_5 --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb-edu', streaming=True)" --config.mesh.fsdp=8 --config.train.accumulate=2

Gunasekar et al. 2023, arXiv 2306.11644; Li et al. 2023, arXiv 2309.05463; Javaheripi and Bubeck 2023, a Microsoft
Research blog post; Abdin et al. 2024, arXiv 2404.14219 and 2412.08905. The dataset, textbooks that a language model
wrote and selected code and web text, is not public. The command uses FineWeb-Edu (Penedo et al. 2024), web text
selected for its educational value, instead. For Phi-2 and Phi-3, only the number of tokens is published; the other
values are those of Phi-1.5 and Phi-4. Phi-4 has rows of 4,096 tokens, as in all of the authors' run but its end. Source
of each value: `pretrainax recipe --config=phi:4_14b`.

| variant | tokens | hardware of the authors | score |
| --- | --- | --- | --- |
| 1 | 76 B | 8 A100, 4 days | HumanEval 29, and 50.6 after exercises |
| 1_5 | 150 B | 1.5 k A100 hours | WinoGrande 73.4 |
| 2 | 1.4 T | 96 A100, 14 days | MMLU 56.7 |
| 3_3_8b, 3_14b | 3.3, 4.8 T | | MMLU 68.8, 78.0 of the released models, tuned |
| 4_14b | 10 T | 1,920 H100, 21 days | MMLU 84.8 of the released model, tuned |
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupConstant, WarmupLinear
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import BPE, ByteBPE, TokenizerConfig
from pretrainax.zoo.phi import phi

# variant -> (tokens, rows per batch, row length)
RUNS = {
    "1": (36_000 * 1024 * 2048, 1024, 2048),
    "1_5": (150e9, 2048, 2048),
    "2": (1.4e12, 2048, 2048),
    "3_3_8b": (3.3e12, 5760, 4096),
    "3_14b": (4.8e12, 5760, 4096),
    "4_14b": (10e12, 5760, 4096),
}


@with_small_sizes
def get_config(variant: str = "1_5") -> Experiment:
    variant = variant or "1_5"
    model = phi(variant)
    tokens, rows, length = RUNS[variant]
    if variant in ("1_5", "2"):
        learning_rate, schedule = 2e-4, WarmupConstant(warmup_steps=0)
    else:
        learning_rate = 1e-3 if variant == "1" else 3e-4
        schedule = WarmupLinear(warmup_steps=750 if variant == "1" else 3_000)
    if variant == "4_14b":
        model.position.theta = 10_000.0
    return Experiment(
        model=model,
        tokenizer=_tokenizer(variant),
        data=DataConfig(source=PythonDocs(), sequence_length=length),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=learning_rate, b2=0.98, epsilon=1e-7, weight_decay=0.1, clip_norm=1.0),
        schedule=schedule,
        train=TrainConfig(steps=round(tokens / (rows * length)), global_batch_size=rows, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )


def _tokenizer(variant: str) -> TokenizerConfig:
    if variant.startswith("3_"):
        return BPE(vocab_size=32_000)
    return ByteBPE(vocab_size=100_352 if variant == "4_14b" else 50_295)
