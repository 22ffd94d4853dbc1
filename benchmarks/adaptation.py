"""Measures whether pretraining helps small models to learn chunking, over several fine-tuning seeds.

    python benchmarks/adaptation.py --workdir=runs/adaptation --books=books --tasks=tasks --to=docs/adapt.png

The script pretrains a BERT, an ELECTRA and a GPT with 2 blocks of width 128 on `books`, a folder of JSON lines with a
text. Each model then learns CoNLL-2000 from `tasks` (`conll2000/train.jsonl`), starting from the pretrained weights or
from the random weights of step 0 of the same run, so with the same tokenizer.

The learning rate of each start is the best of four on SST-2 with seed 0, for each model. The last validation gives the
metric. The script writes the picture to --to, and the values to a JSON file with the same name. It writes the JSON file
after each table cell and skips cells that the file contains. Several processes can therefore share the models, and an
interrupted script continues.
"""

import argparse
import collections
import json
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
import runs
from matplotlib import figure
from sklearn import feature_extraction, linear_model

from pretrainax.files.atomic_files import write_atomically
from pretrainax.reporting.curves import FAINT, PART_COLORS, STYLE
from pretrainax.reporting.tables import markdown
from pretrainax.tasks import label_metrics
from pretrainax.tasks.conll import TASKS as CONLL

MODELS = {
    "BERT": runs.BERT,
    "ELECTRA": [
        *("--config=configs/electra_small.py", "--config.model.d_model=128", "--config.model.d_ff=512", *runs.ENCODER),
        *("--config.model.num_heads=2", "--config.model.embedding_dim=None"),
        "--config.model.generator=Generator(num_layers=2, d_model=64, d_ff=256, num_heads=1)",
    ],
    "GPT": ["--config=configs/gpt2.py:tiny"],
}
OFFSET = {"textcoords": "offset points", "fontsize": 9}
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


TAGS = f"TokenClassification(words_field='tokens', tags_field='tags', labels={CONLL['conll2000'].task.labels})"  # pyright: ignore[reportAttributeAccessIssue]
TEXT = ["--config=finetune:classification"]
BUCKETS = "--config.data.packing=OneEach(buckets="
SETS = {
    "sst2": Set("accuracy", "valid", 432, 64, [*TEXT, f"{BUCKETS}(24, 40))"], 6),
    "conll2000": Set(
        *("strict_f1", "test", 279, 128),
        ["--config=finetune:token_classification", f"--config.objective={TAGS}", f"{BUCKETS}(40, 64))"],
        is_of_texts=False,
    ),
}


RATE_TASK, TASK = SETS  # SST-2 selects the learning rates, and CoNLL-2000 is reported
SPLITS = ("train", "test")  # of CoNLL-2000
RATE = 3e-4  # learning rate; 1/9, 1/3 and 3 times this value are tried too
PRETRAINED, RANDOM = "pretrained", "random weights"
STARTS = {RANDOM: "@0", PRETRAINED: ""}  # name -> suffix of the pretrained run: "@0" selects step 0


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


def learn(options: argparse.Namespace, model: str, task: str, start: str, rate: float, more: Sequence[str]) -> str:
    """Trains the missing runs of a task, model, start and learning rate, over seeds; returns their folder."""
    chosen = SETS[task]
    folder = os.path.join(options.tasks, task)
    source = f"JsonLines(path={folder + '/train.jsonl'!r}, valid_path={f'{folder}/{chosen.valid}.jsonl'!r})"
    name = f"{task}-{model}-{start}-{rate:.1g}".replace(" ", "_").replace(",", "")
    fields = {
        "data.source": source,
        "data.sequence_length": chosen.length,
        "checkpoint.init_from": os.path.join(options.workdir, model) + STARTS[start],
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
    fields |= {"model.head": "Classify(pooling='mean')"} if chosen.is_of_texts and model in ENCODERS else {}
    workdir = os.path.join(options.workdir, name)
    flags = [*chosen.flags, *(f"--config.{field}={value}" for field, value in fields.items())]
    runs.command([*flags, f"--workdir={workdir}", *more])
    return workdir


def best_rate(options: argparse.Namespace, model: str, start: str) -> float:
    """Returns the best of four learning rates on SST-2 with seed 0."""
    rates = [RATE * factor for factor in (1 / 9, 1 / 3, 1, 3)]
    found = {r: curve(learn(options, model, RATE_TASK, start, r, ["--seeds=1"]), 0, RATE_TASK) for r in rates}
    return max(rates, key=lambda rate: found[rate][-1][1])


def curve(workdir: str, seed: int, task: str) -> list[tuple[int, float]]:
    """Returns step and metric of each validation of a run."""
    lines = runs.lines(os.path.join(workdir, f"seed-{seed}"))
    return [(line["step"], line[SETS[task].figure]) for line in lines if line["split"] == "valid"]


def measure(options: argparse.Namespace, model: str, path: str) -> None:
    """Adds missing results of a model to a file: the pretraining, and the learning rate and curves of each start."""
    for start in STARTS:
        if len(known(path).get(model, {}).get("starts", {}).get(start, {}).get("curves", [])) >= options.seeds:
            continue
        pretraining = pretrain(options, model)
        rate = best_rate(options, model, start)
        workdir = learn(options, model, TASK, start, rate, [f"--seeds={options.seeds}"])
        curves = [curve(workdir, seed, TASK) for seed in range(options.seeds)]
        found = known(path)  # read again, because another process may have added other models
        mine = found.setdefault(model, {"starts": {}}) | {"pretraining": pretraining}
        mine["starts"][start] = {"rate": rate, "curves": curves}
        found[model] = mine
        write_atomically(path, json.dumps(found) + "\n")
        print(model, start, [c[-1][1] for c in curves], file=sys.stderr, flush=True)


def baselines(folder: str) -> dict[str, float]:
    """Returns the strict F1 of chunkers without a Transformer: the most frequent tag of a word, and a linear model.

    The linear model is a logistic regression on the word, its neighbors, both pairs, and the last three letters.
    """
    (words, tags), (test_words, test_tags) = (_tagged(os.path.join(folder, f"{split}.jsonl")) for split in SPLITS)
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for word, tag in zip(sum(words, []), sum(tags, []), strict=True):
        counts[word][tag] += 1
    most_frequent = sum(counts.values(), collections.Counter()).most_common(1)[0][0]
    best = {word: count.most_common(1)[0][0] for word, count in counts.items()}
    vectorizer = feature_extraction.DictVectorizer()
    features = _int32_indices(vectorizer.fit_transform(sum(map(_window, words), [])))
    linear = linear_model.LogisticRegression(C=3, max_iter=25, solver="saga", tol=1e-2, random_state=0)
    linear.fit(features, sum(tags, []))
    predictions = {
        "most frequent tag of the word": [[best.get(word, most_frequent) for word in row] for row in test_words],
        "logistic regression on three words": [
            linear.predict(_int32_indices(vectorizer.transform(_window(row)))).tolist() for row in test_words
        ],
    }
    return {n: label_metrics.span_metrics(x, test_tags, "iob2")["strict_f1"] for n, x in predictions.items()}


def _tagged(path: str) -> tuple[list[list[str]], list[list[str]]]:
    with open(path) as file:
        records = [json.loads(line) for line in file]
    return [record["tokens"] for record in records], [record["tags"] for record in records]


def _window(words: Sequence[str]) -> list[dict[str, str]]:
    row = ["<s>", *words, "</s>"]
    return [
        {"word": w, "before": a, "after": b, "suffix": w[-3:], "pair": f"{a} {w}", "next pair": f"{w} {b}"}
        for a, w, b in zip(row, row[1:], row[2:], strict=False)
    ]


def _int32_indices(matrix):
    """Converts the indices of a sparse matrix to the type that the solver supports."""
    matrix.indices, matrix.indptr = matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32)
    return matrix


def known(path: str) -> dict[str, dict]:
    """Returns the results in a file, {model: results} in the order of MODELS, and {"baselines": {name: F1}}."""
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        found = json.load(file)
    return {name: found[name] for name in (*MODELS, "baselines") if name in found}


# --- results ---------------------------------------------------------------------------------------------------------


def finals(cell: dict) -> np.ndarray:
    return np.array([curve[-1][1] for curve in cell["curves"]])


def tables(found: dict[str, dict]) -> str:
    """Returns three tables: the pretraining, each start with the paired differences per seed, and the baselines."""
    trained, cells = [], []
    for model, one in ((model, found[model]) for model in MODELS):
        pretraining, numbers = one["pretraining"], {start: finals(one["starts"][start]) for start in STARTS}
        trained.append([model, f"{pretraining['tokens']:,}", f"{pretraining['loss']:.3f}"])
        means = [f"{n.mean():.3f} ± {n.std(ddof=1):.3f}" for n in numbers.values()]
        cells.append([model, *means, runs.gain(numbers[PRETRAINED], numbers[RANDOM])])
    return "\n".join(
        [
            markdown(["model", "tokens", "validation loss"], trained),
            markdown(["model", *STARTS, "difference"], cells),
            markdown(["baseline", "strict F1"], [[name, f"{score:.3f}"] for name, score in found["baselines"].items()]),
        ]
    )


def draw(path: str, found: dict[str, dict]) -> None:
    """Draws the mean and the range over seeds against the steps, with one panel per model."""
    with matplotlib.rc_context(STYLE):
        picture = figure.Figure(figsize=(3.6 * len(MODELS), 3.4), dpi=120)
        panels = picture.subplots(1, len(MODELS), sharey=True, squeeze=False)[0]
        for panel, model in zip(panels, MODELS, strict=True):
            for color, start in zip(PART_COLORS, STARTS, strict=False):
                curves = found[model]["starts"][start]["curves"]
                values, steps = np.array([[v for _, v in curve] for curve in curves]), [step for step, _ in curves[0]]
                panel.plot(steps, values.mean(0), color=color, lw=1.8, marker="o", ms=4, label=start)
                panel.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)
                offset = (0, 9) if start == PRETRAINED else (0, -17)
                panel.annotate(start, (steps[-1], values.mean(0)[-1]), offset, color=color, ha="right", **OFFSET)
            for name, score in found["baselines"].items():
                panel.axhline(score, color=FAINT, lw=1, ls=(0, (4, 2)))
                panel.annotate(name, (steps[-1], score), (0, 3), color=FAINT, ha="right", **OFFSET)
            panel.set_title(model)
        panels[0].set_ylabel("strict F1, CoNLL-2000 test")
        picture.supxlabel("steps of 32 sentences", color=FAINT, fontsize=10)
        picture.tight_layout()
        picture.savefig(path, facecolor="white")


def main() -> None:
    parser = runs.parser(__doc__, "books")
    parser.add_argument("--tasks", required=True, help="folder with one folder per task")
    parser.add_argument("--steps", type=int, default=6_000, help="pretraining steps, with 32 rows of 128 tokens each")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--to", required=True, help="picture, such as docs/adapt.png; the values go to docs/adapt.json")
    options = parser.parse_args()
    numbers = os.path.splitext(options.to)[0] + ".json"
    for model in options.models:
        measure(options, model, numbers)
    found = known(numbers)
    if missing := [model for model in MODELS if found.get(model, {"starts": {}})["starts"].keys() != STARTS.keys()]:
        sys.exit(f"{numbers} has no results of {', '.join(missing)}. Run the missing --models.")
    found["baselines"] = baselines(os.path.join(options.tasks, TASK))
    write_atomically(numbers, json.dumps(found) + "\n")
    draw(options.to, found)
    print(tables(found))


if __name__ == "__main__":
    main()
