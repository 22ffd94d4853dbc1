"""Measures whether pretraining helps: small models learn four tasks with five methods, over several seeds.

    python benchmarks/adaptation.py --workdir=runs/adaptation --books=books --tasks=tasks --to=docs/adapt.png

The script pretrains a BERT, an ELECTRA, a T5 and a GPT with 2 blocks of width 128 on `books`, a folder of JSON lines
with a text. Each model then learns SST-2, CoLA, RTE and CoNLL-2000 from `tasks` (`sst2/train.jsonl`). The five methods:

- all parameters, from random weights: the checkpoint of step 0 of the same run, so with the same tokenizer
- all parameters, pretrained
- LoRA
- a prefix
- the head alone

The learning rate of each method is the best of four on SST-2 with seed 0, for each model. The last validation gives the
metric. The script writes the picture to --to, and the values to a JSON file with the same name. It writes the JSON file
after each table cell and skips cells that the file contains. Several processes can therefore share the models, and an
interrupted script continues.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple, Optional

import matplotlib
import numpy as np
import runs
from matplotlib import figure

from pretrainax.files.atomic_files import write_atomically
from pretrainax.reporting.curves import FAINT, PART_COLORS, STYLE
from pretrainax.reporting.tables import markdown
from pretrainax.tasks.conll import TASKS as CONLL

MODELS = {
    "BERT": runs.BERT,
    "ELECTRA": [
        *("--config=configs/electra_small.py", "--config.model.d_model=128", "--config.model.d_ff=512", *runs.ENCODER),
        *("--config.model.num_heads=2", "--config.model.embedding_dim=None"),
        "--config.model.generator=Generator(num_layers=2, d_model=64, d_ff=256, num_heads=1)",
    ],
    "T5": ["--config=configs/t5_base.py:tiny"],  # 2 blocks in each stack
    "GPT": ["--config=configs/gpt2.py:tiny"],
}
ENCODERS = ("BERT", "ELECTRA")  # pretrained without a sentence-level loss on the first token, so they use mean pooling


class Set(NamedTuple):
    """The data, the metric and the training settings of a task."""

    figure: str
    valid: str  # file with the held-out records
    steps: int  # with 32 records each: two epochs of SST-2, one epoch of the other tasks
    length: int  # tokens per row
    flags: list[str]
    validations: int = 3  # per run
    is_of_texts: bool = True  # the task labels whole texts, not words


PAIR = "Classification(text_field='premise', pair_field='hypothesis', labels=('0', '1'))"
TAGS = f"TokenClassification(words_field='tokens', tags_field='tags', labels={CONLL['conll2000'].task.labels})"  # pyright: ignore[reportAttributeAccessIssue]
TEXT = ["--config=finetune:classification"]
ROOM, PREFIX = 128, 20  # GPT has 128 learned positions; a prefix takes 20 of them, so its rows are 20 tokens shorter
BUCKETS = "--config.data.packing=OneEach(buckets="
SETS = {
    "sst2": Set("accuracy", "valid", 432, 64, [*TEXT, f"{BUCKETS}(24, 40))"], 6),
    "cola": Set("matthews", "valid", 267, 40, [*TEXT, f"{BUCKETS}(16,))"]),
    "rte": Set("accuracy", "valid", 105, ROOM, [*TEXT, f"--config.objective={PAIR}", f"{BUCKETS}(64,))"]),
    "conll2000": Set(
        *("strict_f1", "test", 279, ROOM),
        ["--config=finetune:token_classification", f"--config.objective={TAGS}", f"{BUCKETS}(40, 64))"],
        is_of_texts=False,
    ),
}


class Way(NamedTuple):
    """A method to train a model on a task."""

    start: str  # suffix of the pretrained run: "@0" selects step 0
    rate: float  # learning rate; 1/9, 1/3 and 3 times this value are tried too
    tuning: Optional[str] = None


WHOLE, RANDOM = "whole", "whole, random weights"
WAYS = {
    RANDOM: Way("@0", 3e-4),
    WHOLE: Way("", 3e-4),
    "LoRA": Way("", 3e-3, "LoRA(rank=8)"),
    "prefix": Way("", 1e-2, f"PrefixTuning(length={PREFIX})"),
    "head alone": Way("", 1e-2, "HeadAlone()"),
}


def pretrain(options: argparse.Namespace, model: str) -> dict[str, float]:
    """Pretrains a model unless it exists; returns the number of tokens and the validation loss."""
    steps = options.steps
    fields = {
        "data.source": runs.books(options.books),
        "data.sequence_length": 128,
        "schedule.warmup_steps": steps // 20,
        "train.steps": steps,
        "model.num_layers": 2,
        "evaluate.every": steps // 10,
        "checkpoint.every": steps // 10,
        "checkpoint.keep": 1,
        "checkpoint.keep_at": "(0,)",
    }
    lines = runs.train(os.path.join(options.workdir, model), [*MODELS[model], *runs.PRETRAINING], fields)
    return {"tokens": lines[-1]["tokens"], "loss": runs.last_loss(lines)}


def learn(options: argparse.Namespace, model: str, task: str, way: str, rate: float, more: Sequence[str]) -> str:
    """Trains the missing runs of a task, model, method and learning rate, over seeds; returns their folder."""
    kind, chosen = WAYS[way], SETS[task]
    folder = os.path.join(options.tasks, task)
    source = f"JsonLines(path={folder + '/train.jsonl'!r}, valid_path={f'{folder}/{chosen.valid}.jsonl'!r})"
    name = f"{task}-{model}-{way}-{rate:.1g}".replace(" ", "_").replace(",", "")
    fields = {
        "data.source": source,
        "data.sequence_length": chosen.length,
        "checkpoint.init_from": os.path.join(options.workdir, model) + kind.start,
        "model.dropout_rate": 0.1,
        "model.attention_dropout_rate": 0.1,
        "optimizer.learning_rate": rate,
        "schedule.warmup_steps": chosen.steps // 10,
        "train.steps": chosen.steps,
        "train.attention": "xla",
        "evaluate.every": chosen.steps // chosen.validations,
        "evaluate.select_by": chosen.figure,
        "checkpoint.every": chosen.steps,
    }
    fields |= {"tuning": kind.tuning} if kind.tuning else {}
    fields |= {"data.sequence_length": ROOM - PREFIX} if (model, way, chosen.length) == ("GPT", "prefix", ROOM) else {}
    fields |= {"model.head": "Classify(pooling='mean')"} if chosen.is_of_texts and model in ENCODERS else {}
    workdir = os.path.join(options.workdir, name)
    flags = [*chosen.flags, *(f"--config.{field}={value}" for field, value in fields.items())]
    runs.command([*flags, f"--workdir={workdir}", *more])
    return workdir


def best_rate(options: argparse.Namespace, model: str, way: str) -> float:
    """Returns the best of four learning rates on SST-2 with seed 0."""
    rates = [WAYS[way].rate * factor for factor in (1 / 9, 1 / 3, 1, 3)]
    found = {rate: curve(learn(options, model, "sst2", way, rate, ["--seeds=1"]), 0, "sst2") for rate in rates}
    return max(rates, key=lambda rate: found[rate][-1][1])


def curve(workdir: str, seed: int, task: str) -> list[tuple[int, float]]:
    """Returns step and metric of each validation of a run."""
    lines = runs.lines(os.path.join(workdir, f"seed-{seed}"))
    return [(line["step"], line[SETS[task].figure]) for line in lines if line["split"] == "valid"]


def measure(options: argparse.Namespace, model: str, path: str) -> None:
    """Adds missing results of a model to a file: the pretraining, and learning rate and curves per task and method."""
    for task, way in ((task, way) for task in options.sets for way in WAYS):
        sets = known(path).get(model, {}).get("tasks", {})
        if len(sets.get(task, {}).get(way, {}).get("curves", [])) >= options.seeds:
            continue
        pretraining = pretrain(options, model)
        rates = [ways[way]["rate"] for ways in sets.values() if way in ways] or [best_rate(options, model, way)]
        workdir = learn(options, model, task, way, rates[0], [f"--seeds={options.seeds}"])
        curves = [curve(workdir, seed, task) for seed in range(options.seeds)]
        found = known(path)  # read again, because another process may have added other models
        mine = found.setdefault(model, {"tasks": {}}) | {"pretraining": pretraining}
        mine["tasks"].setdefault(task, {})[way] = {"rate": rates[0], "curves": curves}
        found[model] = mine
        write_atomically(path, json.dumps(found) + "\n")
        print(task, model, way, [c[-1][1] for c in curves], file=sys.stderr, flush=True)


def known(path: str) -> dict[str, dict]:
    """Returns the results in a file, in the order of MODELS; an empty dict if there is no file."""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        found = json.load(file)
    return {model: found[model] for model in MODELS if model in found}


# --- results ---------------------------------------------------------------------------------------------------------


def finals(cell: dict) -> np.ndarray:
    return np.array([curve[-1][1] for curve in cell["curves"]])


def measured_sets(found: dict[str, dict]) -> list[str]:
    """Returns the tasks with results of all models and methods."""
    done = lambda model, task: len(found.get(model, {"tasks": {}})["tasks"].get(task, {})) == len(WAYS)  # noqa: E731
    return [task for task in SETS if all(done(model, task) for model in MODELS)]


def tables(found: dict[str, dict]) -> str:
    """Returns three tables: the pretraining, medians with standard deviations, and paired differences per seed."""
    cells, differences = [], []
    for task in measured_sets(found):
        for model, ways in ((model, one["tasks"][task]) for model, one in found.items()):
            numbers = {way: finals(ways[way]) for way in WAYS}
            medians = [f"{statistics.median(n):.3f} ± {n.std(ddof=1):.3f}" for n in numbers.values()]
            cells.append([f"{task}, {SETS[task].figure}", model, *medians])
            whole = numbers[WHOLE]
            others = [runs.gain(numbers[way], whole) for way in WAYS if way not in (WHOLE, RANDOM)]
            differences.append([task, model, runs.gain(whole, numbers[RANDOM]), *others])
    less = [f"{way} - whole" for way in WAYS if way not in (WHOLE, RANDOM)]
    trained = [
        [m, f"{p['tokens']:,}", f"{p['loss']:.3f}"] for m, p in ((m, o["pretraining"]) for m, o in found.items())
    ]
    return "\n".join(
        [
            markdown(["model", "tokens", "validation loss"], trained),
            markdown(["task, metric", "model", *WAYS], cells),
            markdown(["task", "model", "pretrained - random", *less], differences),
        ]
    )


def draw(path: str, found: dict[str, dict]) -> None:
    """Draws the median and the range over seeds against the steps, with one row of panels per task."""
    with matplotlib.rc_context(STYLE):
        tasks = measured_sets(found)
        rows, columns = len(tasks), len(found)
        height = 2.4 * rows + 1.0
        picture = figure.Figure(figsize=(3.4 * columns, height), dpi=120)
        panels = picture.subplots(rows, columns, sharey="row", squeeze=False)
        for row, task in zip(panels, tasks, strict=True):
            for panel, (model, one) in zip(row, found.items(), strict=True):
                for color, way in zip(PART_COLORS, WAYS, strict=False):
                    cell = one["tasks"][task][way]
                    values = np.array([[value for _, value in curve] for curve in cell["curves"]])
                    steps = [step for step, _ in cell["curves"][0]]
                    panel.plot(steps, np.median(values, 0), color=color, lw=1.8, label=way)
                    panel.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)
                panel.set_title(f"{model}: {task}, {SETS[task].figure}")
        handles, labels = panels[0][0].get_legend_handles_labels()
        picture.legend(handles, labels, ncols=len(WAYS), frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.0))
        picture.supxlabel("steps of 32 records", color=FAINT, fontsize=10, y=0.1 / height)
        picture.tight_layout(rect=(0, 0.2 / height, 1, 1 - 0.4 / height))
        picture.savefig(path, facecolor="white")


def main() -> None:
    parser = runs.parser(__doc__, "books")
    parser.add_argument("--tasks", required=True, help="folder with one folder per task")
    parser.add_argument("--steps", type=int, default=6_000, help="pretraining steps, with 32 rows of 128 tokens each")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), metavar="TASK")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--to", required=True, help="picture, such as docs/adapt.png; the values go to docs/adapt.json")
    options = parser.parse_args()
    numbers = os.path.splitext(options.to)[0] + ".json"
    for model in options.models:
        measure(options, model, numbers)
    found = known(numbers)
    if not measured_sets(found):
        sys.exit(f"{numbers} has no task with results of all models and methods. Run the missing --models.")
    draw(options.to, found)
    print(tables(found))


if __name__ == "__main__":
    main()
