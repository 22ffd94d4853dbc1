"""Fine-tuning: a trained model learns a task, with BERT's recipe (Devlin et al. 2018, appendix A.3, arXiv 1810.04805).

    python -m pretrainax.main --config=finetune:sst2 --config.checkpoint.init_from=runs/mine

`init_from` is a run (RUN@best, RUN@2000 too), an export or a Hugging Face directory: architecture and tokenizer are
its own, its heads are left out, and that of the task is drawn anew. Without it a BERT-base begins with random numbers.

Tasks by name, of GLUE: `:cola :sst2 :mrpc :stsb :qqp :mnli :qnli :rte :wnli`; of multiple choice `:race :race_middle
:race_high :swag`; of answers in passages `:squad :squad_v2`; of SuperGLUE `:boolq :cb :copa :multirc
:superglue_rte :wic :wsc`. The same from TFDS:
`--config.data.source="TFDS(name='glue/sst2')"`. Your own records, one text or two each:

    --config=finetune:classification --config.data.source="JsonLines(path='train.jsonl', valid_path='valid.jsonl')"
    --config.objective="Classification(text_field='text', label_field='label', labels=('bad', 'good'))"

or `--config=finetune:regression` with `--config.objective="Regression(pair_field='other')"`, `--config=finetune:choice`
with `--config.objective="MultipleChoice(context_fields=('passage',), choices=5)"`, or `--config=finetune:answers` with
`--config.objective="ExtractiveQA(no_answer=True)"`.

A tag for each word: `:conll2003` (names of persons and places), `:conll2000` (chunks), or your own, as files of CoNLL
or records with lists of words and of tags (`TokenClassification(words_field=..., tags_field=...)`):

    --config=finetune:token_classification --config.data.source="ConllFiles(path='train.conll', valid_path='dev.conll')"
    --config.objective="TokenClassification(labels=('O', 'B-LOC', 'I-LOC'))"

All tags of a sentence as a whole: `--config.model.head.kind=crf`, and `--config.model.head.follows=auto` for none that
begins no span. From TFDS: `--config.data.source="TFDS(name='conll2003', valid_split='dev')"
--config.objective.tags_field=ner`.

The paper tries learning rates of 2e-5, 3e-5 and 5e-5, batches of 16 and 32, and 2 to 4 epochs, and takes the best on
the validation split; here it is one of them. A model as small as a trial's learns with ten times the rate.
"""

from typing import Optional

from pretrainax.config import (
    CheckpointConfig,
    Classify,
    DataConfig,
    EvaluateConfig,
    Experiment,
    Extract,
    HeadConfig,
    Tag,
    TrainConfig,
    UserError,
)
from pretrainax.config.errors import nearest
from pretrainax.data.sources import JsonLines
from pretrainax.interop.start import beginning_of
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.tasks import (
    Classification,
    ExtractiveQA,
    MultipleChoice,
    Regression,
    TokenClassification,
    conll,
    glue,
    questions,
    superglue,
)
from pretrainax.tasks.glue import NamedTask
from pretrainax.tokenization import WordPiece
from pretrainax.zoo.bert import bert
from pretrainax.zoo.family import without_heads

BATCH, EPOCHS, OWN_EXAMPLES = 32, 3, 10_000
OWN = {
    kind: NamedTask(task, JsonLines(path="records.jsonl"), OWN_EXAMPLES, "", length=384 if kind == "answers" else 128)
    for kind, task in (
        ("classification", Classification(labels=("0", "1"))),
        ("regression", Regression()),
        ("choice", MultipleChoice()),
        ("answers", ExtractiveQA()),
        ("token_classification", TokenClassification(labels=("O", "B-X", "I-X"))),
    )
}


def get_config(variant: str = "sst2", init_from: Optional[str] = None) -> Experiment:
    known = glue.TASKS | conll.TASKS | questions.TASKS | superglue.TASKS | OWN
    if (variant or "sst2") not in known:
        raise UserError(f"--config=finetune:{variant}: {nearest(variant, known)}")
    named = known[variant or "sst2"]
    model, tokenizer = without_heads(bert("base")), WordPiece(vocab_size=30_522, lowercase=True)
    heads: tuple[HeadConfig, ...] = (Classify(), Tag(), Extract())
    if init_from is not None:
        model, tokenizer, heads = beginning_of(init_from)
    model.head = next((head for head in heads if type(head) is type(named.task.head(model))), None)
    steps = EPOCHS * named.examples // BATCH
    length = min(named.length, model.position.max_length or named.length)
    return Experiment(
        model=model,
        tokenizer=tokenizer,
        data=DataConfig(source=named.source, sequence_length=length),
        objective=named.task,
        optimizer=AdamW(learning_rate=3e-5, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0, bias_correction="none"),
        schedule=WarmupLinear(warmup_steps=steps // 10),
        train=TrainConfig(steps=steps, global_batch_size=BATCH),
        evaluate=EvaluateConfig(every=max(steps // 10, 1), batches=0, select_by=named.select_by),
        checkpoint=CheckpointConfig(every=max(steps // 10, 1), keep=1, init_from=init_from),
    )
