"""Mistral 7B by causal language modelling (Jiang et al. 2023, arXiv 2310.06825): `:7b` (version 0.1) and `:7b_v0_3`.

    python -m pretrainax.main --config=configs/mistral.py --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)" --config.mesh.fsdp=64

The authors publish the architecture and neither data, tokens, hardware nor hyperparameters. All that is not the model
is here LLaMA 2's; each number: `pretrainax recipe --config=mistral`. FineWeb (Penedo et al. 2024) stands in for the
text, 15 T tokens of the web.

Scores of the released `:7b` (table 2): MMLU 60.1, HellaSwag 81.3, ARC challenge 55.5, GSM8K 52.2, HumanEval 30.5. This
recipe need not reach them.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import BPE
from pretrainax.zoo.mistral import mistral

TOKENS, BATCH_TOKENS = 2e12, 4 * 2**20


def get_config(variant: str = "7b") -> Experiment:
    model = mistral(variant or "7b")
    return Experiment(
        model=model,
        tokenizer=BPE(vocab_size=model.vocab_size),
        data=DataConfig(source=PythonDocs(), sequence_length=8192),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=3e-4, b2=0.95, epsilon=1e-5, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(warmup_steps=2_000, final_fraction=0.1),
        train=TrainConfig(
            steps=round(TOKENS / BATCH_TOKENS), global_batch_size=BATCH_TOKENS // 8192, log_every=10, remat="auto"
        ),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
