"""Pretrains GPT-2 with causal language modelling (Radford et al. 2019). Variants: `:124m :355m :774m :1558m`; for a
laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/gpt2.py:124m --config.data.source="HuggingFace(
        path='Skylion007/openwebtext')"

The recipe is nanoGPT's reproduction, 295 B tokens. Source of each value: `pretrainax recipe --config=gpt2`. WebText was
never released; OpenWebText follows its description. Expected for `:124m` on OpenWebText: validation loss about 2.85
after 4 days on 8 A100 40 GB (nanoGPT's README).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.gpt import gpt2


@with_small_sizes
def get_config(variant: str = "124m") -> Experiment:
    model = gpt2(variant or "124m")
    model.dropout_rate = model.attention_dropout_rate = 0.0  # the published 0.1 is for many epochs on a small dataset
    return Experiment(
        model=model,
        tokenizer=ByteBPE(vocab_size=50_257),
        data=DataConfig(source=PythonDocs(), sequence_length=1024),
        objective=CausalLM(),
        optimizer=AdamW(learning_rate=6e-4, b2=0.95, weight_decay=0.1, clip_norm=1.0),
        schedule=WarmupCosine(warmup_steps=2_000, final_fraction=0.1),
        train=TrainConfig(steps=600_000, global_batch_size=480),
        evaluate=EvaluateConfig(every=1_000, batches=20),
        checkpoint=CheckpointConfig(every=1_000),
    )
