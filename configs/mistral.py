"""Pretrains Mistral 7B with causal language modelling (Jiang et al. 2023, arXiv 2310.06825). Variants: `:7b` (version
0.1) and `:7b_v0_3`.

    python -m pretrainax.main --config=configs/mistral.py --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)" --config.mesh.fsdp=64

The authors publish the architecture and neither data, tokens, hardware nor hyperparameters. All values outside the
model are LLaMA 2's. Source of each value: `pretrainax recipe --config=mistral`. The command uses FineWeb (Penedo et al.
2024), 15 T tokens of web text, instead of the authors' dataset.

Scores of the released `:7b` (table 2): MMLU 60.1, HellaSwag 81.3, ARC challenge 55.5, GSM8K 52.2, HumanEval 30.5. This
recipe may not reach them.
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
