"""Compares the arms of a study with the baselines of its measures: token frequencies, a bag of words."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from pretrainax.studies.outcomes import Findings
from pretrainax.studies.study import Contrast, Measure, Study


def baseline_notes(study: Study, findings: Findings, names: Collection[str]) -> Iterator[str]:
    """Yields a sentence for each arm and named measure with baselines that the arm does not beat."""
    for measure in (measure for measure in study.measures if measure.name in names):
        for arm in study.arms:
            if found := _unbeaten(measure, findings, arm.name):
                yield f"{measure.name}: {arm.name} is not better than {', '.join(found)}."


def baseline_warning(study: Study, findings: Findings, contrast: Contrast) -> str:
    """Returns a sentence that names the baselines that neither arm of a contrast beats; "" if there are none.

    The difference between two arms that do not beat a baseline means little: a constant or a linear model is better
    than both.
    """
    measure = study.measure(contrast.measure)
    one, other = (_unbeaten(measure, findings, arm) for arm in (contrast.one, contrast.other))
    names = [name for name in one if name in other]
    return f" Neither is better than the baseline: {', '.join(names)}." if names else ""


def _unbeaten(measure: Measure, findings: Findings, arm: str) -> Sequence[str]:
    """Returns "NAME (VALUE)" of each baseline that is at least as good as an arm's mean over its runs."""
    values = [x.value for seeds in findings.outcomes.get(measure.name, {}).get(arm, {}).values() for x in seeds]
    if not values:
        return []
    sign = 1 if measure.larger_is_better else -1
    found = findings.baselines.get(measure.name, {}).items()
    return [f"{name} ({x.value:.4g})" for name, x in found if sign * x.value >= sign * float(np.mean(values))]
