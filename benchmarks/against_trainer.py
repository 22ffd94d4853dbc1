"""Compares fine-tuning here and in transformers' Trainer on the same model and records: accuracy over seeds, and speed.

    python benchmarks/against_trainer.py --model=runs/bert --task=tasks/sst2 --workdir=runs/against_trainer

`model` is a pretrained BERT; the Trainer loads its export. `task` is a folder with train.jsonl and valid.jsonl, whose
records have a text and a label.

Both programs use the same number of steps, 32 records per step, at most 64 tokens per record, and the same AdamW,
learning rate, linear decay, clipping and dropout. The Trainer pads to the longest record of a batch; PretrainAX pads to
32 or 64. Each program draws the order of the records and the new head from its own seed. The programs alternate on the
CPU, each command in a separate process with the same timing. Requires the extra `parity`.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

import runs

from pretrainax.reporting.tables import markdown

STEPS, ROWS, LENGTH, RATE, WARMUP, DROPOUT = 648, 32, 64, 3e-4, 64, 0.1
WINDOW = STEPS // 12  # steps per timing window


def here(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Runs PretrainAX; returns the last accuracy, the median examples/s over windows, and seconds of the command."""
    workdir = os.path.join(options.workdir, f"here-{seed}")
    train, valid = (os.path.join(options.task, f"{split}.jsonl") for split in ("train", "valid"))
    fields = {
        "data.source": f"JsonLines(path={train!r}, valid_path={valid!r})",
        "data.sequence_length": LENGTH,
        "data.packing": f"OneEach(buckets=({LENGTH // 2},))",
        "checkpoint.init_from": options.model,
        "checkpoint.every": STEPS,
        "model.dropout_rate": DROPOUT,
        "model.attention_dropout_rate": DROPOUT,
        "optimizer": f"AdamW(learning_rate={RATE}, epsilon=1e-6, weight_decay=0.01, clip_norm=1.0)",
        "schedule.warmup_steps": WARMUP,
        "train.steps": STEPS,
        "train.global_batch_size": ROWS,
        "train.seed": seed,
        "train.log_every": WINDOW,
        "evaluate.every": STEPS,
    }
    words = ["--config=finetune:classification", *(f"--config.{field}={value}" for field, value in fields.items())]
    start = time.perf_counter()
    runs.command([*words, f"--workdir={workdir}"])
    seconds = time.perf_counter() - start
    lines = runs.lines(workdir)
    (accuracy,) = (line["accuracy"] for line in lines if line["split"] == "valid")
    speeds = [ROWS / line["step_seconds"] for line in lines if line.get("step_seconds")]
    return {"accuracy": accuracy, "speed": statistics.median(speeds), "seconds": seconds}


def there(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Runs the Trainer in a separate process and returns the same metrics."""
    start = time.perf_counter()
    words = [f"--{name}={getattr(options, name)}" for name in ("model", "task", "workdir")]
    done = subprocess.run([sys.executable, __file__, *words, f"--trainer={seed}"], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1]) | {"seconds": time.perf_counter() - start}


def trainer(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Runs the Trainer in this process; returns the last accuracy and the median examples/s over windows."""
    import transformers

    class Records:
        def __init__(self, split: str):
            with open(os.path.join(options.task, f"{split}.jsonl")) as file:
                records = [json.loads(line) for line in file]
            read = [tokenizer(r["text"], truncation=True, max_length=LENGTH) for r in records]
            self.rows = [{**ids, "labels": r["label"]} for ids, r in zip(read, records, strict=True)]

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, i: int) -> dict:
            return self.rows[i]

    class Windows(transformers.TrainerCallback):
        """Records the end time of each window of steps."""

        ends: list[float] = []

        def on_step_end(self, args, state, control, **_) -> None:
            if state.global_step % WINDOW == 0:
                self.ends.append(time.perf_counter())

    exported = exported_to(options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    transformers.set_seed(seed)
    dropout = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(exported, num_labels=2, **dropout)
    arguments = transformers.TrainingArguments(
        output_dir=os.path.join(options.workdir, f"there-{seed}"),
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=RATE,
        warmup_steps=WARMUP,
        weight_decay=0.01,
        adam_epsilon=1e-6,
        seed=seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    run = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Records("train"),
        eval_dataset=Records("valid"),
        processing_class=tokenizer,
        callbacks=[Windows()],
        compute_metrics=lambda result: {"accuracy": float((result.predictions.argmax(-1) == result.label_ids).mean())},
    )
    run.train()
    speeds = [WINDOW * ROWS / (end - start) for start, end in itertools.pairwise(Windows.ends)]
    return {"accuracy": run.evaluate()["eval_accuracy"], "speed": statistics.median(speeds)}


def exported_to(options: argparse.Namespace) -> str:
    """Exports the model for transformers unless the export exists; returns the folder."""
    folder = os.path.join(options.workdir, "exported")
    if not os.path.exists(folder):
        words = ["export", f"--workdir={options.model}", f"--to={folder}"]
        subprocess.run([sys.executable, "-m", "pretrainax.huggingface", *words], check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="workdir of a run that pretrained a BERT")
    parser.add_argument("--task", required=True, help="folder with train.jsonl and valid.jsonl")
    parser.add_argument("--workdir", required=True, help="new folder for the runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trainer", metavar="SEED", type=int, help="run the Trainer in this process")
    options = parser.parse_args()
    if options.trainer is not None:
        print(json.dumps(trainer(options, options.trainer)))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"  # like use_cpu of the Trainer
    exported_to(options)
    sides = {"PretrainAX": here, "Trainer": there}
    found = {name: [] for name in sides}
    for seed in range(options.seeds):
        for name, run in sides.items():
            found[name].append(run(options, seed))
            print(name, seed, found[name][-1], file=sys.stderr, flush=True)

    def spread(numbers: list[float], digits: int) -> str:
        return f"{statistics.median(numbers):,.{digits}f} ({min(numbers):,.{digits}f} to {max(numbers):,.{digits}f})"

    columns = {name: {key: [run[key] for run in runs] for key in runs[0]} for name, runs in found.items()}
    digits = {"accuracy": 3, "speed": 0, "seconds": 0}
    rows = [[name, *(spread(values[key], digits[key]) for key in digits)] for name, values in columns.items()]
    ours, theirs = columns.values()
    ratios = {key: [a / b for a, b in zip(ours[key], theirs[key], strict=True)] for key in digits}
    rows.append(["ratio, per seed", *(spread(ratios[key], 2) for key in digits)])
    print(markdown(["side", "accuracy", "examples/s in training", "seconds of the command"], rows))


if __name__ == "__main__":
    main()
