"""Pretrains gpt-oss with causal language modelling (OpenAI 2025, arXiv 2508.10925). Variants: `:20b` and `:120b`.

    python -m pretrainax.main --config=configs/gpt_oss.py --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)" --config.mesh.data=4 --config.mesh.fsdp=8 --config.mesh.expert=8

The authors publish the architecture: 20.9 and 116.8 B parameters, of which 4.2 and 5.7 B are active per token, with
embeddings. They publish almost nothing about the training: trillions of tokens on H100s. All values outside the model
are LLaMA 2's. Source of each value: `pretrainax recipe --config=gpt_oss`. Rows have 4,096 tokens, the context before
the extension with YaRN. The command uses FineWeb (Penedo et al. 2024) instead of the authors' dataset. The released
models were then trained to reason and to use tools. Their scores (MMLU 85.3 and 90.0) include this training, and this
recipe may not reach them.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, RotaryPositions, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.gpt_oss import gpt_oss

TOKENS, BATCH_TOKENS, CONTEXT = 2e12, 4 * 2**20, 4096


def get_config(variant: str = "20b") -> Experiment:
    model = gpt_oss(variant or "20b")
    model.position = RotaryPositions(CONTEXT, theta=150_000.0)
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=200_019),  # the model has a few more rows
        data=DataConfig(source=PythonDocs(), sequence_length=CONTEXT),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=3e-4, b2=0.95, epsilon=1e-5, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(warmup_steps=2_000, final_fraction=0.1),
        train=TrainConfig(
            steps=round(TOKENS / BATCH_TOKENS), global_batch_size=BATCH_TOKENS // CONTEXT, log_every=10, remat="auto"
        ),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
