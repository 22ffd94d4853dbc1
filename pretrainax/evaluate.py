"""Evaluates a model on text or tasks: `python -m pretrainax.evaluate --from=DIR [--source="TextFiles(path='other')"]`.

--from (or --workdir) names a run (its newest checkpoint), RUN@2000 (step 2000), RUN@best, RUN@average (the mean of all
saved checkpoints; RUN@average5: of the newest 5), an export, a Hugging Face directory or hf:org/name[@revision]. A run
uses the parameters that config.evaluate.parameters selects; RUN@ema selects their moving average, and RUN@trained the
trained parameters.

Without --source and --tasks, the command repeats the validation of the run: it prints the metrics on the validation
split, and samples. Flags may change the data (`--config.data.source=…`), the number of batches
(`--config.evaluate.batches=0`: all), the objective (`--config.evaluate.objective=…`; `--config.objective.…` if the run
has no such objective), and the mesh. A flag for a field that has no effect in a validation is an error.

--source scores any text with any model: perplexity, bits per token and bits per byte, with the standard error over
documents. A decoder reads from left to right, in overlapping windows. An encoder predicts each token from all others
(metrics pseudo_…). An encoder-decoder predicts the targets of its objective (metrics target_…).

For a model with a task head, also from a Hugging Face directory, --source computes the metrics of the task on labelled
records: `--source="Tsv(path='dev.tsv')" --split=all`. Flags describe the records:
`--config.objective.text_field=review` is the field of the text; `--config.objective.labels=bad,good` are the labels in
the order of the head's outputs; `--config.objective.numbered=good,bad` are the labels that 0 and 1 mean in the records,
if that order differs.

`--source=… --bytes-of-spans` scores spans of the text that are chosen by their bytes. The spans are the same for every
model, and their bits per byte compare encoders, encoder-decoders and decoders (docs/how-to/compare-families.md).
--beside=OTHER adds the difference from another model on these spans.

--tasks=grammar,blimp:my/folder,my_task.json evaluates tasks without training. docs/how-to/tasks.md lists the tasks and
explains how to write a task. --examples=N uses at most N examples of each task.

The command prints the results and writes them as JSON to DIR/evaluations (for a model of the hub: to
evaluations/org--name), or to --output=FILE. --every-checkpoint evaluates all saved checkpoints of a run and plots the
results over the steps.

To use several processes, start them by hand, as launch/README.md describes under "Elsewhere". They share the mesh of
the run and support only the validation of the run.
"""

from absl import flags

from pretrainax import cli
from pretrainax.evaluation.command import Evaluation
from pretrainax.files.paths import define_path
from pretrainax.interop.origin import NAMES
from pretrainax.scoring.corpus_scores import SPLITS
from pretrainax.scoring.span_choice import SpanChoice


def main() -> None:
    """Defines the flags and runs the command. The flags are local because other commands use the same names."""
    defined = {
        "from": define_path("from", None, NAMES, takes_hub=True),
        "source": flags.DEFINE_string(
            "source",
            None,
            "Data source to score, such as TextFiles(path='other'); by default, the run's own validation",
        ),
        "split": flags.DEFINE_enum("split", "valid", list(SPLITS), "--source: split to score"),
        "documents": flags.DEFINE_integer(
            "documents", None, "--source: maximum number of documents of each part of the source", lower_bound=1
        ),
        "context": flags.DEFINE_integer(
            "context", None, "--source: tokens that the model reads at a time; by default as in training"
        ),
        "stride": flags.DEFINE_integer(
            "stride", None, "--source, decoders: tokens between the starts of two windows; by default half of --context"
        ),
        "by-word": flags.DEFINE_bool(
            "by-word", False, "--source, encoders: mask the rest of a word together with each of its tokens"
        ),
        "seed": flags.DEFINE_integer(
            "seed", None, "--source: seed of the corruption for denoising models, and of --bytes-of-spans"
        ),
        "bytes-of-spans": flags.DEFINE_bool(
            "bytes-of-spans", False, "--source: score spans that are the same for every model family"
        ),
        "span-share": flags.DEFINE_float(
            "span-share", SpanChoice.share, "--bytes-of-spans: fraction of the text in spans"
        ),
        "span-bytes": flags.DEFINE_float(
            "span-bytes", SpanChoice.mean_bytes, "--bytes-of-spans: mean length of a span, in bytes"
        ),
        "span-context": flags.DEFINE_integer(
            "span-context", SpanChoice.context, "--bytes-of-spans: bytes of context on each side of a span"
        ),
        "beside": define_path(
            "beside", None, "--bytes-of-spans: another model to compare with, in the forms of --from", takes_hub=True
        ),
        "tasks": flags.DEFINE_list(
            "tasks", None, "Tasks to evaluate without training, such as grammar,blimp:my/folder,my_task.json"
        ),
        "examples": flags.DEFINE_integer(
            "examples", None, "--tasks: maximum number of examples of each task, evenly spaced"
        ),
        "every-checkpoint": flags.DEFINE_bool(
            "every-checkpoint", False, "Evaluate all saved checkpoints of a run, and plot the results over the steps"
        ),
        "output": define_path("output", None, "JSON file for the results; by default a new file in DIR/evaluations"),
    }
    command = Evaluation(defined)
    cli.run(command.run, config=command.config)


if __name__ == "__main__":
    main()
