"""Creates studies and findings for tests of statistics and reports."""

from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from pretrainax.data.sources import TextFiles
from pretrainax.files.json_files import JsonObject
from pretrainax.studies.measures import BitsPerByte, Throughput
from pretrainax.studies.outcomes import FinalRun, Findings, Outcome, Outcomes, Trial
from pretrainax.studies.study import Arm, Budget, Contrast, Final, Study, Tuning

BITS = BitsPerByte("bits per byte", source=TextFiles(path="held-out"))  # smaller is better, has records
SPEED = Throughput("throughput")  # larger is better, has no records


def made_study(arms: Sequence[str], seeds: int, **fields: object) -> Study:
    """Returns a study whose primary contrast is the first arm against the second by bits per byte."""
    primary = Contrast(BITS.name, arms[0], arms[1])
    values = {"question": "Which arm?", "budget": Budget(flops=1e15), "measures": (BITS,), "primary": primary}
    return Study(arms=tuple(Arm(name, "gpt2") for name in arms), final=Final(seeds=seeds), **{**values, **fields})


def made_findings(outcomes: Mapping[str, Outcomes], measure: str = BITS.name, **fields: object) -> Findings:
    empty = {"trials": (), "chosen": {}, "unfinished": {}, "runs": (), "baselines": {}, "changes": ()}
    return Findings(**{**empty, "outcomes": {measure: outcomes}, **fields})


def made_outcomes(values: Sequence[float], changes: Optional[np.ndarray] = None) -> Outcomes:
    """Returns one outcome for each pretraining seed, from 0.

    Args:
      changes: influences of the records, [seeds, records]; None: no records.
    """
    return {i: [Outcome(float(x), None if changes is None else changes[i])] for i, x in enumerate(values)}


def of_records(table: np.ndarray) -> Outcomes:
    """Returns the outcomes of a measure that is the mean over records, from its values [seeds, records]."""
    values = table.mean(axis=1)
    return made_outcomes(values, (table - values[:, None]) / (table.shape[1] - 1))


def whole_study(seeds: int = 5) -> tuple[Study, Findings]:
    """Returns a study of three arms with tuning, two measures, curves and baselines; its first arm is the best."""
    arms, rng = ("muon", "adamw", "lion"), np.random.default_rng(0)
    rates = (0.25, 0.5, 1.0, 2.0, 4.0)
    study = made_study(
        arms,
        seeds,
        question="Is Muon better than AdamW for a decoder of 10 M parameters at 1e15 FLOPs?",
        measures=(BITS, SPEED),
        tuning=Tuning({"config.optimizer.learning_rate": rates[:4], "config.optimizer.weight_decay": (0.5, 1.0, 2.0)}),
        declared=(Contrast(BITS.name, "lion", "adamw"),),
        margin=0.01,
    )
    records = rng.normal(0, 0.2, 300)
    bits, speed, trials, runs = {}, {}, [], []
    for arm, mean in zip(arms, (1.30, 1.34, 1.341), strict=True):
        table = mean + records + 0.006 * rng.standard_normal((seeds, 1)) + 0.05 * rng.standard_normal((seeds, 300))
        bits[arm] = of_records(table)
        speed[arm] = made_outcomes(2e4 + 800 * rng.standard_normal(seeds))
        for rate in rates[: 5 if arm == "lion" else 4]:
            values = {"config.optimizer.learning_rate": 1e-3 * rate, "config.optimizer.weight_decay": 0.1}
            is_failed = rate == 2 and arm == "muon"
            cost = mean + 0.02 * (np.log2(rate) - (1.0 if arm == "lion" else 0.2)) ** 2
            trials.append(Trial(arm, values, 1000, None if is_failed else cost, 1e15))
        for decay in (0.05, 0.2):
            values = {"config.optimizer.learning_rate": 1e-3, "config.optimizer.weight_decay": decay}
            trials.append(Trial(arm, values, 1000, mean + 0.01, 1e15, stopped_early=decay == 0.2))
        for seed in range(seeds):
            lines = _lines([of_seed[0].value for of_seed in bits[arm].values()][seed])
            command = f"python -m pretrainax.main --config=gpt2 --config.train.seed={seed}"
            runs.append(FinalRun(arm, seed, f"final/{arm}/seed-{seed}", f"{len(runs):064x}", command, 800, 1e15, lines))
    return study, Findings(
        trials=trials,
        chosen={arm: {"config.optimizer.learning_rate": 1e-3, "config.optimizer.weight_decay": 0.1} for arm in arms},
        unfinished={"lion": "the best learning rate is the largest"},
        runs=runs,
        outcomes={BITS.name: bits, SPEED.name: speed},
        baselines={BITS.name: {"unigram": Outcome(2.41)}},
        changes=["The seeds 3 and 4 were added after the start."],
    )


def _lines(end: float) -> list[JsonObject]:
    """Returns eight validation lines whose loss falls to `end`."""
    steps = range(100, 900, 100)
    return [
        {"step": n, "split": "valid", "loss": end + 2 * np.exp(-n / 150), "text_tokens": 1e4 * n, "flops": 1.25e12 * n,
         "text_bytes": 4.2e4 * n}
        for n in steps
    ]  # fmt: skip
