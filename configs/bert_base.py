"""Pretrains BERT (Devlin et al. 2018, arXiv 1810.04805). Variants: `:base :large`; for a laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/bert_base.py --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en'),
            HuggingFace(path='manu/project_gutenberg', train_split='en')
        ),
        weights=(2500, 800))"

The objective is masked language modelling together with next sentence prediction. Source of each value:
`pretrainax recipe --config=bert_base`. RoBERTa (Liu et al. 2019) found that full-length rows without sentence pairs
work as well. Flags for this recipe:
`--config.phases="()" --config.model.pair_head=False --config.objective="MaskedLM()"`.

The paper uses English Wikipedia and BooksCorpus, 2,500 and 800 million words (section 3.1). BooksCorpus is no longer
available; the command uses Project Gutenberg instead.

Hardware of the paper: 4 days on 16 TPU chips (base) and on 64 (large). Expected after fine-tuning: GLUE 79.6 (base),
82.1 (large) (Devlin et al. 2018, table 1).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, Phase, TrainConfig
from pretrainax.data.objectives import MaskedLM, NextSentencePrediction
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import WordPiece
from pretrainax.zoo.bert import bert


@with_small_sizes
def get_config(variant: str = "base") -> Experiment:
    return Experiment(
        model=bert(variant or "base"),
        tokenizer=WordPiece(vocab_size=30_522, lowercase=True),
        data=DataConfig(source=PythonDocs(), sequence_length=512),
        objective=NextSentencePrediction(
            masking=MaskedLM(rate=0.15, mask_fraction=0.8, random_fraction=0.1), short_fraction=0.1
        ),
        optimizer=AdamW(learning_rate=1e-4, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0, bias_correction="none"),
        schedule=WarmupLinear(warmup_steps=10_000),
        train=TrainConfig(steps=1_000_000, global_batch_size=256),
        evaluate=EvaluateConfig(every=5_000, batches=40),
        checkpoint=CheckpointConfig(every=5_000),
        phases=(Phase(share=0.9, sequence_length=128), Phase()),
    )
