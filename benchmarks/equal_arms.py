"""Judges 40 studies of two equal arms with five seeds each, which `docs/studies/equal-arms.toml` trained as one study.

    pretrainax study docs/studies/equal-arms.toml --workdir=DIR --go
    python benchmarks/equal_arms.py DIR

A row is a study. At a level of 5 %, about 2 of 40 find a difference; 0 to 5 of 40 have a probability of 98.6 %.
"""

import collections
import dataclasses
import sys
from collections.abc import Iterator

from pretrainax.reporting.tables import text_table
from pretrainax.studies import measures  # noqa: F401  registers the classes that a study file names
from pretrainax.studies.findings import findings_of
from pretrainax.studies.jobs import Results
from pretrainax.studies.outcomes import Findings
from pretrainax.studies.plan import read_plan
from pretrainax.studies.study import Study
from pretrainax.studies.verdicts import Verdict, judge

SEEDS = 5  # of a study


def verdicts(study: Study, findings: Findings) -> Iterator[Verdict]:
    """Yields the primary verdict of each group of `SEEDS` seeds."""
    for first in range(study.final.seed, study.final.seed + study.final.seeds, SEEDS):
        seeds = range(first, first + SEEDS)
        outcomes = {
            measure: {arm: {seed: found[seed] for seed in seeds} for arm, found in arms.items()}
            for measure, arms in findings.outcomes.items()
        }
        part = findings._replace(runs=[run for run in findings.runs if run.seed in seeds], outcomes=outcomes)
        final = dataclasses.replace(study.final, seed=first, seeds=SEEDS)
        yield judge(dataclasses.replace(study, final=final, margin=None), part)[0]


def main() -> None:
    (workdir,) = sys.argv[1:]
    plan = read_plan(workdir)
    final = plan.study.final
    found = list(verdicts(plan.study, findings_of(Results(plan, workdir), range(final.seed, final.seed + final.seeds))))
    rows = [
        [
            str(i),
            f"{verdict.comparison.estimate.value:+.4f}",
            *(f"{x:+.4f}" for x in verdict.interval or ()),
            verdict.word,
        ]
        for i, verdict in enumerate(found)
    ]
    print(text_table([["study", "difference", "interval from", "to", "verdict"], *rows]))
    print(dict(collections.Counter(verdict.word for verdict in found)))


if __name__ == "__main__":
    main()
