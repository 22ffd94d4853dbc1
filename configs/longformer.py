"""Pretrains Longformer with masked language modelling (Beltagy et al. 2020, arXiv 2004.05150). Variants:
`:base :large`; for a laptop `:tiny :mini :midi`.

    python -m pretrainax.main --config=configs/longformer.py --config.data.source="SourceMixture(
        sources=(
            HuggingFace(path='manu/project_gutenberg', train_split='en'),
            HuggingFace(path='wikimedia/wikipedia', name='20231101.en'),
            HuggingFace(path='allenai/c4', name='realnewslike', valid_split='validation')
        ),
        weights=(5, 21, 18))" --config.checkpoint.init_from=roberta-base --config.checkpoint.adapt="(
        LongerContext(rows='repeat'), FullToSparse())"

The paper starts from RoBERTa (section 5): a Hugging Face directory or a run of `roberta_base`. The command repeats
RoBERTa's 512 positions and restricts its attention to windows of 512 tokens; the projections for global tokens start as
copies. In this config, the first token of each document is global during pretraining; in the paper, global tokens begin
with fine-tuning. The tokenizer is RoBERTa's and comes with the initial checkpoint. Source of each value:
`pretrainax recipe --config=longformer`.

The paper's dataset has 6.5 B tokens of long documents (table 10): BooksCorpus, Wikipedia, a third of RealNews and of
Stories. The command uses Project Gutenberg instead of BooksCorpus and C4's realnewslike instead of RealNews; nothing
replaces Stories.

Hardware of the paper: 8 RTX 8000, two days for base (section 5). Expected: 1.705 bits per token on the paper's dataset
after 65,000 steps (base, table 5); after fine-tuning, IMDB 95.7 and WikiHop 75.0 (base, table 7).
"""

from pretrainax.config import CheckpointConfig, DataConfig, EvaluateConfig, Experiment, TrainConfig
from pretrainax.data.objectives import MaskedLM
from pretrainax.data.sources import PythonDocs
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.scaling.small import with_small_sizes
from pretrainax.tokenization import ByteBPE
from pretrainax.zoo.longformer import longformer


@with_small_sizes
def get_config(variant: str = "base") -> Experiment:
    return Experiment(
        model=longformer(variant or "base"),
        tokenizer=ByteBPE(vocab_size=50_265, special_pieces="roberta"),
        data=DataConfig(source=PythonDocs(), sequence_length=4096),
        objective=MaskedLM(rate=0.15, mask_fraction=0.8, random_fraction=0.1),
        optimizer=AdamW(
            learning_rate=3e-5, b2=0.98, epsilon=1e-6, weight_decay=0.01, clip_norm=None, bias_correction="rate"
        ),
        schedule=WarmupLinear(warmup_steps=500),
        train=TrainConfig(steps=65_000, global_batch_size=64, remat="auto"),
        evaluate=EvaluateConfig(every=1_000, batches=4),
        checkpoint=CheckpointConfig(every=1_000),
    )
