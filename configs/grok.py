"""Pretrains Grok-1 with causal language modelling (xAI 2024). Variant: `:1_314b`, eight experts, two per token.

    python -m pretrainax.main --config=configs/grok.py --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)" --config.mesh.fsdp=64 --config.mesh.expert=8

The authors publish the architecture and the weights, and neither data, tokens, hardware nor hyperparameters. All values
outside the model are LLaMA 2's. Source of each value: `pretrainax recipe --config=grok`. The command uses FineWeb
(Penedo et al. 2024) instead of the authors' dataset. Scores that the authors report before tuning: MMLU 73, GSM8K 62.9,
HumanEval 63.2.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import BPE
from pretrainax.zoo.grok import grok

TOKENS, BATCH_TOKENS, CONTEXT = 2e12, 4 * 2**20, 8192


def get_config(variant: str = "1_314b") -> Experiment:
    model = grok(variant or "1_314b")
    return Experiment(
        model=model,
        tokenizer=BPE(vocab_size=model.vocab_size),
        data=DataConfig(source=PythonDocs(), sequence_length=CONTEXT),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=1.5e-4, b2=0.95, epsilon=1e-5, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(warmup_steps=2_000, final_fraction=0.1),
        train=TrainConfig(
            steps=round(TOKENS / BATCH_TOKENS), global_batch_size=BATCH_TOKENS // CONTEXT, log_every=10, remat="auto"
        ),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
