"""Pretrains OLMoE with causal language modelling (Muennighoff et al. 2024, arXiv 2409.02060). Variant: `:1b_7b`, 64
experts, 8 per token.

    python -m pretrainax.main --config=configs/olmoe.py --config.mesh.fsdp=8 --config.mesh.expert=8
        --config.data.source="HuggingFace(path='allenai/OLMoE-mix-0924', streaming=True)"

The learning rate falls to a tenth over 5 T tokens, and to zero over the last 100 B. The authors trained on 5.1 T tokens
in 10 days on 256 H100. 1.3 of 6.9 billion parameters are active per token. Source
of each value: `pretrainax recipe --config=olmoe`. Scores of the released model (table 4): MMLU 54.1, HellaSwag 80.0,
ARC challenge 62.1.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.olmo import olmoe

TOKENS, ROWS, CONTEXT = 5.133e12, 1024, 4096


def _steps(tokens: float) -> int:
    return round(tokens / (ROWS * CONTEXT))


def get_config(variant: str = "1b_7b") -> Experiment:
    model = olmoe(variant or "1b_7b")
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=50_280),
        data=DataConfig(source=PythonDocs(), sequence_length=CONTEXT),
        objective=CausalLM(),
        optimizer=AdamW(
            learning_rate=4e-4,
            b2=0.95,
            epsilon=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
            decay_norms=True,
            decay_biases=True,
        ),
        schedule=WarmupCosine(
            warmup_steps=2_500,
            start_fraction=0.1,
            final_fraction=0.1,
            cosine_steps=_steps(5e12),
            anneal_steps=_steps(100e9),
        ),
        train=TrainConfig(steps=_steps(TOKENS), global_batch_size=ROWS, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
