"""Evaluates a model on text or tasks: `python -m pretrainax.evaluate --from=DIR [--source="TextFiles(path='other')"]`.

--from (or --workdir) names a run (its newest checkpoint), RUN@2000 (step 2000), RUN@best, RUN@average (the mean of all
saved checkpoints; RUN@average5: of the newest 5), an export, a Hugging Face directory or hf:org/name[@revision]. A run
uses the parameters that config.evaluate.parameters selects; RUN@ema selects their moving average, and RUN@trained the
trained parameters.

Without --source and --tasks, the command repeats the run's own validation: it prints the metrics on the validation
split, and samples. Flags may change the data (`--config.data.source=…`), the number of batches
(`--config.evaluate.batches=0`: all), the mesh, and the objective (`--config.evaluate.objective=…`; for a run without a
validation objective, `--config.objective.…`). A flag for a field that has no effect on validation is an error.

--source scores any text with any model: perplexity, bits per token and bits per byte, with 95 % intervals over
documents. A decoder reads from left to right, in overlapping windows. An encoder predicts each token from all others
(metrics pseudo_…). An encoder-decoder predicts the targets of its objective (metrics target_…).

For a model with a task head, also from a Hugging Face directory, --source computes the metrics of the task on labelled
records: `--source="Tsv(path='dev.tsv')" --split=all`. Flags describe the records:
`--config.objective.text_field=review` names the field of the text, and `--config.objective.labels=bad,good` lists the
labels in the order of the head's outputs. If the records number the labels in a different order,
`--config.objective.numbered=good,bad` lists the labels that 0 and 1 stand for.

`--source=… --bytes-of-spans` scores byte spans of the text. The spans are the same for every model, so their bits per
byte are comparable between encoders, encoder-decoders and decoders (docs/how-to/compare-families.md).

--compare-with=OTHER adds the paired differences from another model on the same spans, documents or examples, with 95 %
intervals, and states which differences are distinguishable from 0. Without --source, it compares the heads of a task on
the validation records of two runs.

--tasks=grammar,blimp:my/folder,my_task.json evaluates tasks without training. docs/how-to/tasks.md lists the tasks and
explains how to write a task. --examples=N uses at most N examples of each task.

The command prints the results and writes them as JSON to DIR/evaluations (for a model on the Hub, to
evaluations/org--name), or to --output=FILE. --transcripts=FILE writes each document, span, record or example with its
score, from which the results can be recomputed. --every-checkpoint evaluates all saved checkpoints of a run and plots
the results against the step.

To use several processes, start them by hand, as launch/README.md describes under "Elsewhere". They share the run's mesh
and can only repeat the run's own validation.
"""

import functools
from typing import TYPE_CHECKING

from absl import flags

from pretrainax import cli
from pretrainax.files.paths import MODEL_NAMES, define_path
from pretrainax.scoring.results import SPLITS
from pretrainax.scoring.span_choice import SpanChoice

if TYPE_CHECKING:
    from pretrainax.evaluation.command import Evaluation


def main() -> None:
    """Defines the flags and runs the command.

    The flags are not defined on import, because other commands define flags with the same names.
    """
    command_flags = _define_flags()

    @functools.cache
    def command() -> "Evaluation":
        from pretrainax.evaluation.command import Evaluation  # local import: JAX takes seconds

        return Evaluation(command_flags)

    cli.run(lambda: command().run(), config=lambda: command().config(), run_flags=("workdir",))


def _define_flags() -> dict[str, flags.FlagHolder]:
    return {
        "from": define_path("from", None, MODEL_NAMES, takes_hub=True),
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
        "compare-with": define_path(
            "compare-with",
            None,
            "--source, --tasks, task heads: another model, whose paired difference is printed, in the forms of --from",
            takes_hub=True,
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
        "transcripts": define_path(
            "transcripts",
            None,
            "--source and --tasks: JSON Lines file for each document, span or example with its score",
        ),
        "output": define_path("output", None, "JSON file for the results; by default a new file in DIR/evaluations"),
    }


if __name__ == "__main__":
    main()
