"""Pretrains Mixtral with causal language modelling (Jiang et al. 2024, arXiv 2401.04088). Variants: `:8x7b` and
`:8x22b`, version 0.1.

    python -m pretrainax.main --config=configs/mixtral.py --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb', streaming=True)" --config.mesh.fsdp=256

The authors publish the architecture and neither data, tokens, hardware nor hyperparameters. All values outside the
model are LLaMA 2's. Source of each value: `pretrainax recipe --config=mixtral`. The command uses FineWeb (Penedo et al.
2024), 15 T tokens of web text, instead of the authors' dataset. No token is dropped;
`--config.model.experts.capacity=1.25` limits each expert to 1.25 times an even share of the tokens.

Scores of the released `:8x7b` (table 2): MMLU 70.6, HellaSwag 84.4, ARC challenge 59.7, GSM8K 74.4, HumanEval 40.2.
This recipe may not reach them.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import BPE
from pretrainax.zoo.mixtral import mixtral

TOKENS, BATCH_TOKENS, CONTEXT = 2e12, 4 * 2**20, 8192


def get_config(variant: str = "8x7b") -> Experiment:
    model = mixtral(variant or "8x7b")
    return Experiment(
        model=model,
        tokenizer=BPE(vocab_size=model.vocab_size),
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
