"""Fine-tuning: a trained model learns a task, with BERT's recipe (Devlin et al. 2018, appendix A.3, arXiv 1810.04805).

    python -m pretrainax.main --config=finetune:sst2 --config.checkpoint.init_from=runs/mine

`init_from` is a run (RUN@best, RUN@2000 too), an export or a Hugging Face directory: architecture and tokenizer are
its own, its heads are left out, and that of the task is drawn anew. Without it a BERT-base begins with random numbers.

Tasks by name, of GLUE: `:cola :sst2 :mrpc :stsb :qqp :mnli :qnli :rte :wnli`. The same from TFDS:
`--config.data.source="TFDS(name='glue/sst2')"`. Your own records, one text or two each:

    --config=finetune:classification --config.data.source="JsonLines(path='train.jsonl', valid_path='valid.jsonl')"
    --config.objective="Classification(text_field='text', label_field='label', labels=('bad', 'good'))"

or `--config=finetune:regression` with `--config.objective="Regression(pair_field='other')"`.

The paper tries learning rates of 2e-5, 3e-5 and 5e-5, batches of 16 and 32, and 2 to 4 epochs, and takes the best on
the validation split; here it is one of them. A model as small as a trial's learns with ten times the rate.
"""

from typing import Optional

from pretrainax.config import CheckpointConfig, Classify, DataConfig, EvaluateConfig, Experiment, TrainConfig, UserError
from pretrainax.config.errors import nearest
from pretrainax.data.sources import JsonLines
from pretrainax.interop.start import beginning_of
from pretrainax.optim import AdamW, WarmupLinear
from pretrainax.tasks import Classification, Regression
from pretrainax.tasks.glue import TASKS, NamedTask
from pretrainax.tokenization import WordPiece
from pretrainax.zoo.bert import bert
from pretrainax.zoo.family import without_heads

BATCH, EPOCHS, OWN_EXAMPLES = 32, 3, 10_000
OWN = {
    kind: NamedTask(task, JsonLines(path="records.jsonl"), OWN_EXAMPLES, "")
    for kind, task in (("classification", Classification(labels=("0", "1"))), ("regression", Regression()))
}


def get_config(variant: str = "sst2", init_from: Optional[str] = None) -> Experiment:
    known = TASKS | OWN
    if (variant or "sst2") not in known:
        raise UserError(f"--config=finetune:{variant}: {nearest(variant, known)}")
    named = known[variant or "sst2"]
    model, tokenizer, head = without_heads(bert("base")), WordPiece(vocab_size=30_522, lowercase=True), Classify()
    if init_from is not None:
        model, tokenizer, head = beginning_of(init_from)
    model.head = head
    steps = EPOCHS * named.examples // BATCH
    length = min(128, model.position.max_length or 128)
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
