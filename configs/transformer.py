"""Trains the Transformer on translation (Vaswani et al. 2017, arXiv 1706.03762). Variants: `:base :big`.

    python -m pretrainax.main --config=configs/transformer.py --config.data.source="HuggingFace(
        path='wmt/wmt14', name='de-en', valid_split='validation',
        text_field='translation.en', target_field='translation.de')"

For your own files, set `--config.data.source.path="wmt14/*.jsonl.gz"`, with lines such as {"en": "So it is.", "de": "So
ist es."}.

Each row holds several pairs. Both languages share the byte-pair vocabulary. Source of each value:
`pretrainax recipe --config=transformer`.

At the end, the run also validates the average of the last 5 (base) or 20 (big) checkpoints. `--from=RUN@average5` loads
this average, which the paper scored (section 6.1). The checkpoint interval is 10 minutes on the paper's machine.

Hardware of the paper: 8 P100, 12 hours (base) and 3.5 days (big). Expected on WMT 2014 English to German, newstest2014,
with beam size 4 and averaged checkpoints: BLEU 27.3 (base), 28.4 (big) (table 2).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import SequenceToSequence
from pretrainax.data.sources import JsonLines
from pretrainax.optim import AdamW, WarmupInverseSquareRoot
from pretrainax.tokenization import BPE
from pretrainax.zoo.transformer import transformer

WARMUP = 4_000  # steps
# variant -> (steps, checkpoint interval: 10 minutes in the paper, number of checkpoints to average)
RECIPES = {"base": (100_000, 1_500, 5), "big": (300_000, 600, 20)}


def get_config(variant: str = "base") -> Experiment:
    variant = variant or "base"
    model = transformer(variant)
    steps, every, average = RECIPES[variant]
    return Experiment(
        model=model,
        tokenizer=BPE(vocab_size=37_000, special_pieces="t5"),
        data=DataConfig(
            source=JsonLines(path="wmt14", text_field="en", target_field="de", valid_fraction=0.001),
            sequence_length=256,
        ),
        objective=SequenceToSequence(),
        optimizer=AdamW(
            learning_rate=(model.d_model * WARMUP) ** -0.5,  # the peak: 0.0007 (base), 0.0005 (big)
            b2=0.98,
            epsilon=1e-9,
            weight_decay=0.0,
            clip_norm=None,
            bias_correction="rate",
        ),
        schedule=WarmupInverseSquareRoot(warmup_steps=WARMUP),
        train=TrainConfig(steps=steps, global_batch_size=96, label_smoothing=0.1),
        evaluate=EvaluateConfig(every=3_000, batches=40, average=average),
        checkpoint=CheckpointConfig(every=every, keep=average),
    )
