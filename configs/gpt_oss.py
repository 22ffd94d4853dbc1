"""gpt-oss by causal language modelling (OpenAI 2025, arXiv 2508.10925): `:20b` and `:120b`.

    python -m pretrainax.main --config=configs/gpt_oss.py --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)" --config.mesh.fsdp=32 --config.mesh.expert=8

The authors publish the architecture, 20.9 and 116.8 B parameters of which a token uses 4.2 and 5.7 with its embeddings,
and of the training next to nothing: trillions of tokens on H100s. All that is not the model is here LLaMA 2's; each
number: `pretrainax recipe --config=gpt_oss`. Rows have the 4,096 tokens from which YaRN stretches the context. FineWeb
(Penedo et al. 2024) stands in for the text. The released models were trained on after it to reason and to use tools;
their scores (MMLU 85.3 and 90.0) are of that, and this recipe need not reach them.
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
        tokenizer=ByteBPE(vocab_size=200_019),  # the model has a few rows more
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
