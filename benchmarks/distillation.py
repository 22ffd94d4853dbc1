"""Compares a 2-layer student with a 4-layer BERT as teacher and the same student alone, at equal FLOPs.

    python benchmarks/distillation.py --workdir=runs/distillation --source="JsonLines(path='books/train-*.jsonl.gz')"

All models are masked LMs with the same width and tokenizer. The FLOPs of a distilled step include the teacher's forward
pass, so a student alone runs more steps. They exclude the training of the teacher, which all students share. Students
start from random weights, and from every second layer of the teacher. The metric is the student's own validation loss.
The script skips finished runs and includes them in the table.
"""

import argparse
import os
import statistics
import sys

import runs

from pretrainax.distill import DistilBERT, Distillation, MiniLM, TinyBERT
from pretrainax.reporting.tables import markdown

TEACHER_LAYERS, STUDENT_LAYERS = 4, 2
ALONE = "alone"
# Methods without a loss on the logits add the student's own loss, so that its validation loss can be compared.
WAYS = {
    "soft targets": lambda teacher: Distillation(teacher),
    "DistilBERT": lambda teacher: DistilBERT(teacher),
    "TinyBERT + own loss": lambda teacher: TinyBERT(teacher, hard=1.0),
    "MiniLM + own loss": lambda teacher: MiniLM(teacher, hard=1.0, relation_heads=0),
}
STARTS = ("fresh", "every 2nd layer")


def train(options: argparse.Namespace, name: str, layers: int, steps: int, **fields: object) -> list[dict]:
    """Trains a model unless its run is finished; returns the lines of metrics.jsonl."""
    workdir = os.path.join(options.workdir, name)
    fields |= {
        "data.source": options.source,
        "data.sequence_length": 128,
        "model.num_layers": layers,
        "schedule": f"WarmupCosine(warmup_steps={max(steps // 10, 1)})",
        "train.steps": steps,
        "evaluate.every": steps,
        "evaluate.batches": 80,
        "checkpoint.every": steps,
    }
    return runs.train(workdir, [*runs.BERT, *runs.PRETRAINING], fields)


def flops_of_step(lines: list[dict]) -> float:
    """Returns the mean FLOPs per step of a run."""
    return lines[-1]["flops"] / lines[-1]["step"]


def main() -> None:
    parser = runs.parser(__doc__, "source")
    parser.add_argument("--teacher_steps", type=int, default=2_500, help="steps with 32 rows of 128 tokens")
    parser.add_argument("--steps", type=int, default=500, help="steps of a student with its teacher")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    taught = train(options, "teacher", TEACHER_LAYERS, options.teacher_steps)
    teacher = os.path.join(options.workdir, "teacher")
    loss = f"{runs.last_loss(taught):.3f}"
    rows = [["teacher", "fresh", f"{options.teacher_steps:,}", f"{taught[-1]['flops']:.3g}", loss]]
    for start in options.starts:
        fields = {} if start == "fresh" else {"checkpoint.init_from": teacher, "checkpoint.adapt": "Layers()"}
        for way in (*options.ways, ALONE):
            steps, more = options.steps, dict(fields)
            if way == ALONE:  # a distilled step adds the teacher's forward pass: a third of a teacher step
                whole = flops_of_step(runs.lines(os.path.join(options.workdir, _name(options.ways[0], start, 0))))
                steps = round(options.steps * whole / (whole - flops_of_step(taught) / 3))
            else:
                more["distill"] = WAYS[way](teacher)
            made = [
                train(options, _name(way, start, seed), STUDENT_LAYERS, steps, **more, **{"train.seed": seed})
                for seed in range(options.seeds)
            ]
            losses = [runs.last_loss(run) for run in made]
            spread = f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
            rows.append([way, start, f"{steps:,}", f"{made[0][-1]['flops']:.3g}", spread])
            print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
    print(markdown(["student", "start", "steps", "FLOPs", "validation loss, mean (range)"], rows))


def _name(way: str, start: str, seed: int) -> str:
    return f"{way}-{start}-{seed}".replace(" ", "_")


if __name__ == "__main__":
    main()
