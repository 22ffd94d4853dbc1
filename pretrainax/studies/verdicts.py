"""Decides the contrasts of a study: better, worse, equivalent within the margin, or not known.

- The primary contrast and the declared contrasts are tests with two-sided t intervals. Holm's method keeps the
  probability of one or more false "better" or "worse" among them at 5 %. A study without declared contrasts tests the
  primary contrast at 5 %.
- "Equivalent" needs two one-sided tests against the margin, which applies to the primary measure. Holm's method also
  keeps the probability of one or more false "equivalent" at 5 %. "Equivalent" takes precedence over "better" and
  "worse", because differences below the margin count as equal.
- All other contrasts are exploratory. They have intervals and no verdict.

A verdict requires all seeds of a look (`studies/sequential.py`); without interim looks, all seeds of the study. Further
looks would find differences between equal arms in more than 5 % of studies. A verdict after an increase of
`final.seeds` is a further look, and its text says this.
"""

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Optional

from pretrainax.reporting.significance import ALPHA, holm_levels
from pretrainax.studies.baselines import baseline_warning
from pretrainax.studies.contrasts import Comparison, Noise, compare
from pretrainax.studies.outcomes import Findings, Outcomes
from pretrainax.studies.plan import MORE_SEEDS
from pretrainax.studies.power import MAX_SEEDS, equivalence_power, power, seeds_needed
from pretrainax.studies.sequential import look_levels, look_seeds
from pretrainax.studies.study import Contrast, Study

Role = Literal["primary", "declared", "exploratory"]
Word = Literal["better", "worse", "equivalent", "not known", "tuning not finished", ""]  # "": exploratory


_SEEDS_ADDED = " Seeds were added after a first result, so that a false verdict has a probability above 5 %."


class Verdict(NamedTuple):
    """The result of one contrast."""

    contrast: Contrast
    role: Role
    comparison: Comparison
    level: float  # two-sided level of the test and of `interval`
    interval: Optional[tuple[float, float]]  # None: unknown
    word: Word
    more_seeds: Optional[int]  # seeds to add for a verdict with 80 % power; None: decided, or MAX_SEEDS are too few
    text: str  # one sentence, and a second sentence if neither arm beats a baseline

    @property
    def is_decided(self) -> bool:
        return self.word in ("better", "worse", "equivalent")


class _Test(NamedTuple):
    """A contrast before Holm's method."""

    contrast: Contrast
    role: Role
    unit: str
    comparison: Comparison
    obstacle: str = ""  # why there is no verdict, for example missing seeds; "": there can be one


def judge(study: Study, findings: Findings) -> list[Verdict]:
    """Judges the primary contrast, the declared contrasts, and the exploratory contrasts, in this order.

    The exploratory contrasts compare each arm with the second arm of the primary contrast, by each measure. A
    group-sequential study is judged at its first look that decides the primary contrast, whether or not more seeds are
    finished.
    """
    verdicts: list[Verdict] = []
    for look, seeds in enumerate(look_ranges(study)):
        if look and not _are_finished(study, findings, seeds):
            break
        verdicts = _judge_at(study, findings, look, seeds)
        if verdicts[0].is_decided:
            break
    return verdicts


def look_ranges(study: Study) -> list[range]:
    """Returns the pretraining seeds that are finished at each look; without interim looks, all seeds."""
    return [range(study.final.seed, study.final.seed + count) for count in _look_seeds(study)]


def planned_level(study: Study) -> float:
    """Returns the level of the primary contrast that is certain before the start, for the power of the study."""
    return _level(study, len(_look_seeds(study)) - 1, 1 + len(study.declared))


def _judge_at(study: Study, findings: Findings, look: int, seeds: range) -> list[Verdict]:
    """Judges all contrasts at one look."""
    tested = [study.primary, *study.declared]
    tests = [_test(study, findings, contrast, seeds) for contrast in tested]
    level = functools.partial(_level, study, look)
    levels = holm_levels([1.0 if test.obstacle else test.comparison.estimate.p_value for test in tests], level)
    p_values = {i: p for i, test in enumerate(tests) if (p := _equivalence_p_value(study, test)) is not None}
    equal_levels = dict(zip(p_values, holm_levels(list(p_values.values()), level), strict=True))
    verdicts = [
        _verdict(test, levels[i], equal_levels[i] if p_values.get(i, 1) < equal_levels.get(i, 0) else None, study)
        for i, test in enumerate(tests)
    ]
    verdicts = [v._replace(text=v.text + baseline_warning(study, findings, v.contrast)) for v in verdicts]
    if any(change.startswith(MORE_SEEDS) for change in findings.changes):
        verdicts = [v._replace(text=v.text + _SEEDS_ADDED * v.is_decided) for v in verdicts]
    return verdicts + [_exploratory(study, findings, c, seeds) for c in _other_contrasts(study, tested)]


def _other_contrasts(study: Study, tested: Sequence[Contrast]) -> list[Contrast]:
    reference, pairs = study.primary.other, {(c.measure, frozenset((c.one, c.other))) for c in tested}
    contrasts = [Contrast(m.name, arm.name, reference) for m in study.measures for arm in study.arms]
    return [c for c in contrasts if c.one != reference and (c.measure, frozenset((c.one, c.other))) not in pairs]


def _are_finished(study: Study, findings: Findings, seeds: range) -> bool:
    """Returns True if both arms of the primary contrast have all these seeds."""
    arms = (_outcomes(findings, study.primary.measure, arm) for arm in (study.primary.one, study.primary.other))
    return all(seed in arm for arm in arms for seed in seeds)


def _look_seeds(study: Study) -> tuple[int, ...]:
    return look_seeds(study.final.seeds, study.stop.looks if study.stop.rule == "group_sequential" else 1)


def _level(study: Study, look: int, contrasts: int) -> float:
    """Returns the level of each of several contrasts at a look."""
    return look_levels(_look_seeds(study), ALPHA / contrasts)[look]


def _outcomes(findings: Findings, measure: str, arm: str) -> Outcomes:
    return findings.outcomes.get(measure, {}).get(arm, {})


def _compare(study: Study, findings: Findings, contrast: Contrast, seeds: range) -> _Test:
    """Compares two arms on the seeds that are finished."""
    measure = study.measure(contrast.measure)
    arms = [_outcomes(findings, contrast.measure, arm) for arm in (contrast.one, contrast.other)]
    one, other = ({seed: arm[seed] for seed in seeds if seed in arm} for arm in arms)
    return _Test(contrast, "exploratory", measure.unit, compare(one, other, measure.larger_is_better))


def _test(study: Study, findings: Findings, contrast: Contrast, seeds: range) -> _Test:
    """Compares two arms, and determines if a verdict is possible."""
    test, obstacle = _compare(study, findings, contrast, seeds), ""
    if len(test.comparison.seeds) < len(seeds):
        obstacle = f"{len(test.comparison.seeds)} of {len(seeds)} seeds are finished"
    for arm in (contrast.one, contrast.other):
        choice = findings.choices.get(contrast.measure, {}).get(arm, {})
        if reason := findings.unfinished.get(arm) or choice.get("unfinished"):
            obstacle = f"the tuning of {arm} is not finished, {reason}"
    return test._replace(role="primary" if contrast == study.primary else "declared", obstacle=obstacle)


def _equivalence_p_value(study: Study, test: _Test) -> Optional[float]:
    """Returns the p-value of two one-sided tests; 1 if there is an obstacle, None if the contrast has no margin."""
    from scipy.special import stdtr  # local import, because it takes 0.2 s

    margin, estimate = _margin(study, test.contrast), test.comparison.estimate
    if margin is None:
        return None
    if test.obstacle or not estimate.standard_error:
        return 1.0
    room = (margin - abs(estimate.value)) / estimate.standard_error
    return float(stdtr(estimate.degrees, -room))


def _verdict(test: _Test, level: float, equal_level: Optional[float], study: Study) -> Verdict:
    """Formulates the verdict of a contrast at its level by Holm's method.

    Args:
      equal_level: level of the two one-sided tests if the arms are equivalent; None: they are not.
    """
    contrast, estimate = test.contrast, test.comparison.estimate
    size, more = _size(test, level), None
    if test.obstacle:
        word: Word = "tuning not finished" if "tuning" in test.obstacle else "not known"
        text = f"Not known if {contrast.one} is better than {contrast.other} in {contrast.measure}: {test.obstacle}."
    elif equal_level is not None:
        word = "equivalent"
        text = (
            f"{contrast.one} and {contrast.other} are equivalent in {contrast.measure} within the margin of "
            f"{study.margin:g}: {_size(test, 2 * equal_level)}."
        )
    elif estimate.p_value < level:
        word = "better" if estimate.value > 0 else "worse"
        text = f"{contrast.one} is {word} than {contrast.other} in {contrast.measure}, by {_size(test, level, word)}."
    else:
        word = "not known"
        more, advice = _more_seeds(test.comparison, level, _margin(study, contrast))
        text = f"Not known if {contrast.one} is better than {contrast.other} in {contrast.measure}: {size}; {advice}."
    return Verdict(contrast, test.role, test.comparison, level, estimate.t_interval(level), word, more, text)


def _exploratory(study: Study, findings: Findings, contrast: Contrast, seeds: range) -> Verdict:
    """Estimates a contrast on all finished seeds of a look, without a verdict."""
    test = _compare(study, findings, contrast, seeds)
    text = f"{contrast.one} compared with {contrast.other} in {contrast.measure}: {_size(test, ALPHA)}; exploratory."
    interval = test.comparison.estimate.interval
    return Verdict(contrast, test.role, test.comparison, ALPHA, interval, "", None, text)


def _margin(study: Study, contrast: Contrast) -> Optional[float]:
    return study.margin if contrast.measure == study.primary.measure else None


def _more_seeds(comparison: Comparison, level: float, margin: Optional[float]) -> tuple[Optional[int], str]:
    """Returns the seeds to add for 80 % power, if the true difference is the estimate, and the advice in words."""
    noise, effect, count = comparison.noise, comparison.estimate.value, len(comparison.seeds)
    if noise is None:
        return None, "all seeds have this difference, so that the error is unknown"

    def decided(seeds: int, noise: Noise = noise) -> float:
        equal = 0.0 if margin is None else equivalence_power(margin, seeds, noise, level, abs(effect))
        return max(power(effect, seeds, noise, level), equal)

    needed = seeds_needed(decided)
    if needed is not None:
        more = max(needed - count, 1)
        return more, f"about {more:,} more seed{'s' * (more > 1)} needed"
    if seeds_needed(lambda n: decided(n, noise._replace(record_error=0.0))) is not None:
        return None, "more seeds alone do not decide it, because of the few test records"
    return None, f"more than {MAX_SEEDS:,} seeds needed"


def _size(test: _Test, level: float, word: Optional[Word] = None) -> str:
    """Describes a difference: "+0.0210 bits per byte (95 % interval +0.0100 to +0.0320; 5 seeds, 300 test records)".

    After the word "better" or "worse", a number is the difference in this direction; positive numbers have no sign.
    """
    comparison = test.comparison
    estimate, count = comparison.estimate, len(comparison.seeds)
    sample = f"{count} seed{'s' * (count != 1)}" + f", {comparison.records:,} test records" * bool(comparison.records)
    if comparison.unpaired:
        sample += f"; without the unpaired seeds {', '.join(map(str, comparison.unpaired))}"
    if not count:
        return f"no difference ({sample})"
    decimals, interval = decimals_of(estimate.standard_error), estimate.t_interval(level)
    sign, style = -1 if word == "worse" else 1, f"{'' if word else '+'},.{decimals}f"
    difference = f"{sign * estimate.value:{style}} {test.unit}".rstrip()
    if interval is None:
        return f"{difference} (error unknown; {sample})"
    bounds = " to ".join(f"{bound:{style}}" for bound in sorted(sign * bound for bound in interval))
    return f"{difference} ({confidence(level)} interval {bounds}; {sample})"


def confidence(level: float) -> str:
    """Formats the confidence of an interval: "95 %", "98.75 %"."""
    return f"{100 * (1 - level):.4g} %"


def decimals_of(error: Optional[float]) -> int:
    """Returns the number of decimals that shows two digits of a standard error; 4 if the error is unknown."""
    return 4 if not error else min(max(1 - math.floor(math.log10(error)), 0), 6)
