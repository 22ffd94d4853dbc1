"""Judges studies of two equal arms with five seeds each; `docs/studies/equal-arms.toml` trained their 200 runs per arm.

    pretrainax study docs/studies/equal-arms.toml --workdir=DIR --go
    python benchmarks/equal_arms.py DIR

A row of the table is one of 40 studies, which have no run in common. At a level of 5 %, about 2 of 40 find a
difference; 0 to 5 of 40 have a probability of 98.6 %. The last line counts the verdicts of 1,000 studies that each draw
their seeds from all 200.
"""

import collections
import dataclasses
import random
import sys
from collections.abc import Sequence

from pretrainax.reporting.tables import text_table
from pretrainax.studies import measures  # noqa: F401  registers the classes that a study file names
from pretrainax.studies.findings import findings_of
from pretrainax.studies.jobs import Results
from pretrainax.studies.outcomes import Findings
from pretrainax.studies.plan import read_plan
from pretrainax.studies.study import Study
from pretrainax.studies.verdicts import Verdict, judge

SEEDS = 5  # of a study
DRAWN = 1_000  # studies with seeds drawn from all


def verdict(study: Study, findings: Findings, seeds: Sequence[int]) -> Verdict:
    """Returns the primary verdict of a study that has only these seeds, numbered from 0."""
    number = {seed: i for i, seed in enumerate(seeds)}
    outcomes = {
        measure: {arm: {number[seed]: found[seed] for seed in seeds} for arm, found in arms.items()}
        for measure, arms in findings.outcomes.items()
    }
    runs = [run._replace(seed=number[run.seed]) for run in findings.runs if run.seed in number]
    final = dataclasses.replace(study.final, seed=0, seeds=len(seeds))
    study = dataclasses.replace(study, final=final, margin=None)
    return judge(study, findings._replace(runs=runs, outcomes=outcomes))[0]


def main() -> None:
    (workdir,) = sys.argv[1:]
    plan = read_plan(workdir)
    study, final = plan.study, plan.study.final
    seeds = range(final.seed, final.seed + final.seeds)
    findings = findings_of(Results(plan, workdir), seeds)
    found = [verdict(study, findings, seeds[first : first + SEEDS]) for first in range(0, len(seeds), SEEDS)]
    rows = [
        [str(i), f"{v.comparison.estimate.value:+.4f}", *(f"{x:+.4f}" for x in v.interval or ()), v.word]
        for i, v in enumerate(found)
    ]
    print(text_table([["study", "difference", "interval from", "to", "verdict"], *rows]))
    print(dict(collections.Counter(v.word for v in found)))
    rng = random.Random(0)
    drawn = (verdict(study, findings, sorted(rng.sample(seeds, SEEDS))) for _ in range(DRAWN))
    print(f"{DRAWN} studies with drawn seeds: {dict(collections.Counter(v.word for v in drawn))}")


if __name__ == "__main__":
    main()
