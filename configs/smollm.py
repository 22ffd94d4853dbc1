"""Pretrains SmolLM 3 with causal language modelling (Bakouch et al. 2025, huggingface.co/blog/smollm3). Variants:
`:3_3b`; for a laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/smollm.py --config.mesh.fsdp=64 --config.data.source="HuggingFace(
        path='HuggingFaceFW/fineweb-edu', streaming=True)"

The config covers the 11.1 T tokens in rows of 4,096 tokens. The authors' dataset is web text, with more code and
mathematics in each of three stages; the learning rate decays in the last one. The command uses a part of it,
FineWeb-Edu (Penedo et al. 2024). The stages afterwards are not included: 100 B tokens in rows of 32,768 and 65,536,
with RoPE bases 1.5 M and 5 M. Source of each value: `pretrainax recipe --config=smollm`. Hardware of the authors: 384
H100 for 24 days. Scores of the released model: HellaSwag 76.2, ARC 65.6.
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupConstant
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.smollm import smollm


@with_small_sizes
def get_config(variant: str = "3_3b") -> Experiment:
    model = smollm(variant or "3_3b")
    model.position.theta = 50_000.0
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=128_256),
        data=DataConfig(source=PythonDocs(), sequence_length=4096),
        objective=CausalLM(mask_documents=True),
        optimizer=AdamW(
            learning_rate=2e-4,
            b2=0.95,
            epsilon=1e-8,
            weight_decay=0.1,
            clip_norm=1.0,
            decay_embeddings=False,
            decay_norms=True,
        ),
        schedule=WarmupConstant(warmup_steps=2_000, anneal_steps=522_000),
        train=TrainConfig(steps=4_720_000, global_batch_size=576, log_every=10, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=8),
        checkpoint=CheckpointConfig(every=1_000),
    )
