"""Fine-tunes a trained model on a task, with BERT's recipe (Devlin et al. 2018, appendix A.3, arXiv 1810.04805).

    python -m pretrainax.main --config=finetune:sst2 --config.checkpoint.init_from=runs/mine

`init_from` is a run (also RUN@best, RUN@2000), an export, a Hugging Face directory or hf:org/name. It provides the
architecture and the tokenizer. A new head for the task replaces its heads, unless it has a head with the same labels.
Without `init_from`, the model is a BERT-base with random weights.

Named tasks: GLUE `:cola :sst2 :mrpc :stsb :qqp :mnli :qnli :rte :wnli`; multiple choice
`:race :race_middle :race_high :swag :copa`; answers in passages `:squad :squad_v2`; SuperGLUE
`:boolq :cb :multirc :record :superglue_rte :wic :wsc`. For the copies in TFDS:
`--config.data.source="TFDS(name='glue/sst2')"`. For your own records, with one or two texts each:

    --config=finetune:classification --config.data.source="JsonLines(path='train.jsonl', valid_path='valid.jsonl')"
    --config.objective="Classification(text_field='text', label_field='label')"

or `--config=finetune:regression` with `--config.objective="Regression(pair_field='other')"`, `--config=finetune:choice`
with `--config.objective="MultipleChoice(context_fields=('passage',), choices=5)"`, or `--config=finetune:answers` with
`--config.objective="ExtractiveQA(no_answer=True)"`.

Tagging of words: `:conll2003` (names of persons and places), `:conll2000` (chunks), or your own labels. Input is CoNLL
files, or records with lists of words and of tags (`TokenClassification(words_field=..., tags_field=...)`):

    --config=finetune:token_classification --config.data.source="ConllFiles(path='train.conll', valid_path='dev.conll')"

`--config.model.head.kind=crf` predicts the tags of a sentence jointly; `--config.model.head.follows=auto` forbids
invalid transitions. From TFDS:
`--config.data.source="TFDS(name='conll2003', valid_split='dev')" --config.objective.tags_field=ner`.

Text generation with encoder-decoders and decoders: `:xsum :cnn_dailymail :samsum`, and `:text_to_text` for your own
records, with `--config.objective="TextGeneration(input='summarize: {text}', target_field='summary')"`. The model keeps
its head over the vocabulary; without `init_from` it is a T5. Instructions for decoders: `:alpaca :dolly`, and
`:instructions` for your own conversations; without `init_from` the model is a GPT-2.

Passage retrieval by embeddings, with encoders and decoders: `:natural_questions`, `:msmarco`, and `:retrieval` for your
own records, with `--config.objective="Retrieval(query_field='question', passage_field='answer')"`.

Your own records train for three epochs, with a warmup of a tenth of the steps, and with a validation and a checkpoint
after each epoch. `--config.train.budget="2 epochs"`, `--config.train.steps=500`, `--config.schedule.warmup_steps=100`,
`--config.evaluate.every=50` and `--config.checkpoint.every=50` change this. Without `labels`, the labels are those of
the training records, sorted.

The paper tries learning rates of 2e-5, 3e-5 and 5e-5, batches of 16 and 32, and 2 to 4 epochs, and selects the best by
validation; this config has one of them. A model as small as in a smoke test needs ten times the learning rate.
"""

import copy
from typing import Optional

from pretrainax.config import (
    AUTO,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Experiment,
    TrainConfig,
    UserError,
)
from pretrainax.data.sources import JsonLines
from pretrainax.files.errors import nearest
from pretrainax.interop.start import StartModel, start_model_of
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.tasks import (
    Classification,
    ExtractiveQA,
    Instructions,
    MultipleChoice,
    Regression,
    Retrieval,
    Task,
    TextGeneration,
    TokenClassification,
    conll,
    glue,
    qa_datasets,
    superglue,
    text_datasets,
)
from pretrainax.tasks.glue import NamedTask
from pretrainax.tokenization import ByteBPE, Unigram, WordPiece
from pretrainax.zoo.bert import HUGGINGFACE, bert
from pretrainax.zoo.family import without_heads
from pretrainax.zoo.gpt import gpt2
from pretrainax.zoo.t5 import t5

BATCH, EPOCHS = 32, 3
OWN = {
    kind: NamedTask(task, JsonLines(path="records.jsonl"), 0, "", length=length)
    for kind, length, task in (
        ("classification", 128, Classification()),
        ("regression", 128, Regression()),
        ("choice", 128, MultipleChoice()),
        ("answers", 384, ExtractiveQA()),
        ("token_classification", 128, TokenClassification()),
        ("text_to_text", 512, TextGeneration()),
        ("instructions", 512, Instructions()),
        ("retrieval", 128, Retrieval()),
    )
}


def _fresh(task: Task) -> StartModel:
    """Returns a model with random weights: a BERT, or for text generation a T5 or a GPT-2."""
    if "encoder" in task.families:
        tokenizer = WordPiece(vocab_size=30_522, lowercase=True)
        return StartModel(without_heads(bert("base")), tokenizer, tuple(HUGGINGFACE.classifiers))
    if "encoder_decoder" in task.families:
        return StartModel(t5("v1_0_base"), Unigram(vocab_size=32_000), ())
    return StartModel(gpt2("124m"), ByteBPE(vocab_size=50_257), ())


def get_config(variant: str = "sst2", init_from: Optional[str] = None) -> Experiment:
    known = glue.TASKS | conll.TASKS | qa_datasets.TASKS | superglue.TASKS | text_datasets.TASKS | OWN
    if (variant or "sst2") not in known:
        raise UserError(f"--config=finetune:{variant}: {nearest(variant, known)}")
    named = copy.deepcopy(known[variant or "sst2"])  # flags change the config
    beginning = start_model_of(init_from) if init_from is not None else _fresh(named.task)
    model = beginning.model
    if named.task.has_head:
        model = beginning.with_head(named.task.head)
    steps = EPOCHS * named.examples // BATCH  # 0 for your own records: the data determines it
    every = max(steps // 10, 1) if steps else 0
    length = min(named.length, model.position.max_length or named.length)
    return Experiment(
        model=model,
        tokenizer=beginning.tokenizer,
        data=DataConfig(source=named.source, sequence_length=length),
        objective=named.task,
        optimizer=AdamW(learning_rate=3e-5, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0, bias_correction="none"),
        schedule=WarmupLinear(warmup_steps=steps // 10 if steps else AUTO),  # pyright: ignore[reportArgumentType]
        train=TrainConfig(steps=steps, global_batch_size=BATCH),
        evaluate=EvaluateConfig(every=every, batches=0, select_by=named.select_by),
        checkpoint=CheckpointConfig(every=every, keep=1, init_from=init_from),
    )
