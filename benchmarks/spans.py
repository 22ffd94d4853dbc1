"""Trains a decoder, an encoder and an encoder-decoder on a source with known entropy, and scores spans with each.

`python benchmarks/spans.py --workdir=/tmp/spans` writes text from a Markov chain over words and trains the three models
on it, some minutes in total. It prints the cost of the same new spans for each model (`evaluate --bytes-of-spans`) and
their entropy, which is the lower bound: minus the log of the true probability of a span and its end, given the same
context.
"""

import argparse
import os
import subprocess
import sys

import numpy as np

from pretrainax.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Experiment,
    ModelConfig,
    RotaryPositions,
    TrainConfig,
)
from pretrainax.data.objectives import CausalLM, MaskedLM, SpanCorruption, Spans
from pretrainax.data.sources import TextFiles
from pretrainax.inference.load import load
from pretrainax.optim.optimizers import AdamW
from pretrainax.optim.schedules import WarmupCosine
from pretrainax.reporting.tables import markdown
from pretrainax.scoring.span_choice import Span, SpanChoice
from pretrainax.scoring.span_forms import LEFT, SpanFormat
from pretrainax.scoring.spans import score_spans
from pretrainax.tokenization import ByteBPE, WordPiece

WORDS = ("ab", "bcd", "cdef", "degh", "efi", "fab", "gahic", "hed")  # each starts with a different letter
# One of three words follows each word, with these probabilities. Columns also sum to 1, so all are equally frequent.
STEPS, CHANCES = (1, 2, 5), (0.6, 0.3, 0.1)
TRANSITIONS = np.sum([p * np.roll(np.eye(len(WORDS)), n, axis=1) for n, p in zip(STEPS, CHANCES, strict=True)], axis=0)
LONGEST = 200  # words per span, far more than occur
CHOICE = SpanChoice(share=0.1, mean_bytes=12, context=100)
VARIANTS = ("gpt", "bert", "t5")


def get_config(variant: str) -> Experiment:
    """Returns the config of one of the three models: `--config=benchmarks/spans.py:gpt`."""
    model = ModelConfig(num_layers=2, d_model=64, d_ff=256, num_heads=4)
    model.vocab_size, model.position, model.use_bias = 512, RotaryPositions(), False
    if variant == "bert":
        model.family, model.masked_lm_head = "encoder", True
    if variant == "t5":
        model.family = "encoder_decoder"
    tokenizer, objective = {
        "gpt": (ByteBPE(vocab_size=281), CausalLM()),
        "bert": (
            WordPiece(vocab_size=42),
            MaskedLM(0.15, mask_fraction=1.0, random_fraction=0.0, mask_unit=Spans(stop=0.3)),
        ),
        "t5": (ByteBPE(vocab_size=285, num_sentinels=50, special_pieces="roberta"), SpanCorruption(0.3)),
    }[variant]
    return Experiment(
        model=model,
        tokenizer=tokenizer,
        data=DataConfig(source=TextFiles(path="written by the script"), sequence_length=64, prepare_workers=1),
        objective=objective,
        optimizer=AdamW(learning_rate=1e-3 if variant == "t5" else 3e-3, weight_decay=0.0),
        schedule=WarmupCosine(warmup_steps=100),
        train=TrainConfig(steps=2000, global_batch_size=32, log_every=200),
        evaluate=EvaluateConfig(every=1000, batches=20),
        checkpoint=CheckpointConfig(every=1000),
    )


def texts(count: int, length: int, seed: int) -> list[str]:
    """Draws `count` documents with `length` words each."""
    steps = np.random.default_rng(seed).choice(STEPS, (count, length), p=CHANCES).cumsum(axis=1) % len(WORDS)
    return [" ".join(WORDS[i] for i in row) for row in steps]


def true_bits(form: SpanFormat, span: Span, stop: float) -> float:
    """Returns the entropy of a span in bits, from the chain and the probability `stop` that a word ends a span.

    If the model predicts the end of the span, this includes span and end. If the model receives the number of tokens,
    this includes the span given its number of words, and that number without context.
    """
    a, *inner = (WORDS.index(word) for word in (span.left.split()[-1], *span.text.split()))
    law = stop * (1 - stop) ** np.arange(LONGEST)  # probability of 1, 2, … words
    bits = -np.log2(law[len(inner) - 1])
    bits -= sum(np.log2(TRANSITIONS[x, y]) for x, y in zip([a, *inner], inner, strict=False))
    if form.given == LEFT:
        return bits
    b, behind, chances = WORDS.index(span.right.split()[0]), TRANSITIONS[a], []
    for _ in law:
        behind = behind @ TRANSITIONS
        chances.append(behind[b])  # probability of this number of words between the two sides
    reached = law @ chances if form.predicts_end else chances[len(inner) - 1]
    return bits - np.log2(TRANSITIONS[inner[-1], b]) + np.log2(reached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    folder = os.path.join(arguments.workdir, "text")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "text.txt"), "w") as f:
        f.write("\n\n".join(texts(4000, 60, seed=1)))
    new = texts(1000, 60, seed=2)
    rows = []
    for variant in VARIANTS:
        workdir = os.path.join(arguments.workdir, variant)
        words = [f"--config={__file__}:{variant}", f"--workdir={workdir}", f"--config.data.source.path={folder}"]
        words += [f"--config.data.cache_dir={arguments.workdir}/cache", f"--config.train.steps={arguments.steps}"]
        subprocess.run([sys.executable, "-m", "pretrainax.main", *words], check=True)
        for of in score_spans(load(workdir), new, CHOICE):
            stop = len(of.spans) / sum(len(span.text.split()) for span in of.spans)
            truth = np.array([true_bits(of.form, span, stop) for span in of.spans])
            floor, more = of.per_byte(truth), of.per_byte(of.bits - truth)
            figure, above = of.bits_per_byte, more.times(100 / floor.value)
            cells = [f"{figure.value:.4f} ± {figure.standard_error:.4f}", f"{floor.value:.4f}"]
            cells.append(f"{above.value:.2f} ± {above.standard_error:.2f} %")
            rows.append([variant, of.form.given, f"{of.bytes.sum():,}", *cells])
    print(markdown(["model", "given", "bytes", "bits per byte", "entropy", "above it"], rows))


if __name__ == "__main__":
    main()
