"""Says how good a model is, on text: `python -m pretrainax.evaluate --from=DIR [--source="TextFiles(path='other')"]`.

DIR is a run (its newest checkpoint), DIR@2000, DIR@best, DIR@average (of all that are kept; DIR@average5: of the newest
5), an export, a Hugging Face directory or hf:org/name[@revision]; `--workdir=DIR` does as well. Of the parameters it
takes those that the run validates, as config.evaluate.parameters says; DIR@ema is their moving average, DIR@trained as
they were trained.

Without more, a run's own validation: the figures of what it asks there on its validation split, and samples. Flags may
set what is evaluated, and on what: the text (`--config.data.source=…`), how many batches of it
(`--config.evaluate.batches=0`: all), what is asked (`--config.evaluate.objective=…`; of a run without such an objective
`--config.objective.…` does too, as that is what it validates), the mesh. A field that would change nothing here is
refused.

`--source` scores any text with any model: perplexity, bits per token and per byte, each with its standard error over
documents. A decoder reads from left to right, through windows that overlap; an encoder is asked for each token from all
others (figures that begin with pseudo_), an encoder-decoder for the targets of its objective (target_).

Of a model with the head of a task, a Hugging Face directory too, `--source` gives the task's figures on the records
there: `--source="Tsv(path='dev.tsv')" --split=all`. Flags say how to read them: `--config.objective.text_field=review`;
`--config.objective.labels=bad,good`, names of labels in the order of the head's numbers;
`--config.objective.numbered=good,bad`, what the records mean by 0 and 1 where that is another order.

`--source=… --bytes-of-spans` asks for spans of the text instead, chosen by their bytes: the same ones of every model,
in bits per byte, by which encoders, encoder-decoders and decoders compare (docs/use.md says how). `--beside=OTHER`
gives the difference to another model on these spans.

`--tasks=grammar,blimp:my/folder,my_task.json` asks it tasks that it was not trained for; docs/use.md says which there
are, and how to write one. `--examples=N` asks for N of each.

The results are printed, and written as JSON to DIR/evaluations (of a model of the hub to evaluations/org--name), or to
--output=FILE. `--every-checkpoint` does it for all checkpoints that a run keeps, and draws them over the training.

Several processes are started by hand, as launch/README.md says under "Elsewhere"; they work on the mesh of the run, on
its own validation.
"""

from absl import flags

from pretrainax import cli
from pretrainax.evaluation.asked import Evaluation
from pretrainax.files.paths import define_path
from pretrainax.interop.origin import NAMES
from pretrainax.scoring.corpus_scores import SPLITS
from pretrainax.scoring.span_choice import SpanChoice


def main() -> None:
    """Defines the flags, and runs the command: here, as other commands have flags of the same names."""
    asked = {
        "from": define_path("from", None, NAMES, takes_hub=True),
        "source": flags.DEFINE_string("source", None, "Text to score, as TextFiles(path='other')"),
        "split": flags.DEFINE_enum("split", "valid", list(SPLITS), "--source: which part of it"),
        "documents": flags.DEFINE_integer("documents", None, "--source: at most so many, of each part", lower_bound=1),
        "context": flags.DEFINE_integer("context", None, "Tokens that the model reads at a time; else as in training"),
        "stride": flags.DEFINE_integer("stride", None, "Decoders: tokens between two windows; else half the context"),
        "by-word": flags.DEFINE_bool("by-word", False, "Encoders: the rest of a word is masked with each token of it"),
        "seed": flags.DEFINE_integer("seed", None, "Of the holes that models fill, and of the spans"),
        "bytes-of-spans": flags.DEFINE_bool("bytes-of-spans", False, "--source: spans of it, alike for every family"),
        "span-share": flags.DEFINE_float("span-share", SpanChoice.share, "How much of the text is in spans"),
        "span-bytes": flags.DEFINE_float("span-bytes", SpanChoice.mean_bytes, "Bytes of a span, on average"),
        "span-context": flags.DEFINE_integer("span-context", SpanChoice.context, "Bytes on each side that are read"),
        "beside": define_path("beside", None, "--bytes-of-spans: another model, to be compared with", takes_hub=True),
        "tasks": flags.DEFINE_list("tasks", None, "Tasks without training, as grammar,blimp:my/folder,my_task.json"),
        "examples": flags.DEFINE_integer("examples", None, "--tasks: at most so many of each, evenly spaced"),
        "every-checkpoint": flags.DEFINE_bool("every-checkpoint", False, "All that the run keeps, with a picture"),
        "output": define_path("output", None, "The JSON file of the results; else in DIR/evaluations"),
    }
    command = Evaluation(asked)
    cli.run(command.run, config=command.config)


if __name__ == "__main__":
    main()
