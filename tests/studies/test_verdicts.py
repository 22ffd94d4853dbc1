"""The verdicts of a study: when they are given, and their sentences."""

import numpy as np
import pytest

from pretrainax.studies.outcomes import Outcome
from pretrainax.studies.power import equivalence_power, power
from pretrainax.studies.study import Contrast, Stop
from pretrainax.studies.verdicts import judge, planned_level
from tests.support.made_studies import BITS, SPEED, made_findings, made_outcomes, made_study

NOISE = np.array([0.3, -0.2, 0.1, -0.4, 0.2])  # The standard deviation is 0.29.


def judged(differences, margin=None, **fields):
    """Returns the verdict on two arms; for positive differences, the first arm is better, because it has fewer bits."""
    differences = np.asarray(differences)
    arms = {"new": made_outcomes(3 - differences), "old": made_outcomes(np.full(len(differences), 3.0))}
    study = made_study(list(arms), len(differences), margin=margin, **fields)
    return judge(study, made_findings(arms))[0]


@pytest.mark.parametrize(("shift", "word"), [(1, "better"), (-1, "worse"), (0.1, "not known")])
def test_the_word_of_a_verdict(shift, word):
    verdict = judged(shift + NOISE)
    assert verdict.word == word and verdict.role == "primary" and verdict.is_decided == (word != "not known")


def test_a_verdict_is_one_sentence_with_its_interval():
    assert judged(1 + NOISE).text == (
        "new is better than old in bits per byte, by 1.00 bits per byte (95 % interval 0.64 to 1.36; 5 seeds)."
    )
    assert judged(-1 - NOISE).text == (
        "new is worse than old in bits per byte, by 1.00 bits per byte (95 % interval 0.64 to 1.36; 5 seeds)."
    )


@pytest.mark.parametrize(("baseline", "is_named"), [(1.9, True), (2.1, False)])
def test_a_verdict_names_a_baseline_that_neither_arm_beats(baseline, is_named):
    """Tests arms with 2 and 3 bits per byte."""
    arms = {"new": made_outcomes(2 + NOISE), "old": made_outcomes(np.full(5, 3.0))}
    findings = made_findings(arms, baselines={BITS.name: {"unigram": Outcome(baseline)}})
    verdict = judge(made_study(list(arms), 5), findings)[0]
    assert verdict.word == "better"
    assert verdict.text.endswith(" Neither is better than the baseline: unigram (1.9).") == is_named


def test_an_open_question_states_how_many_seeds_it_needs():
    verdict = judged(0.1 + NOISE)
    needed = 5 + verdict.more_seeds
    noise = verdict.comparison.noise
    assert power(0.1, needed - 1, noise) < 0.8 <= power(0.1, needed, noise)
    assert verdict.text.endswith(f"; about {verdict.more_seeds} more seeds needed.")


def test_a_tie_has_no_winner():
    assert judged(np.zeros(5)).word == judged(NOISE - NOISE.mean()).word == "not known"


def test_one_seed_has_no_winner():
    verdict = judged([5.0])
    assert verdict.word == "not known" and "error unknown" in verdict.text


def test_two_seeds_need_a_difference_of_nine_spreads():
    """Tests the quantile of the t distribution with one degree of freedom, 12.7, which is sqrt(2) spreads of 9.0."""
    apart = np.array([1, -1]) / np.sqrt(2)
    assert judged(8.9 + apart).word == "not known" and judged(9.1 + apart).word == "better"


@pytest.mark.parametrize(("margin", "word"), [(0.6, "equivalent"), (0.2, "not known")])
def test_equivalence_needs_the_interval_within_the_margin(margin, word):
    assert judged(NOISE, margin).word == word


def test_equivalence_states_the_interval_of_its_two_tests():
    text = "new and old are equivalent in bits per byte within the margin of 0.6: +0.00 bits per byte (90 % interval"
    assert judged(NOISE, 0.6).text.startswith(text)


def test_a_difference_below_the_margin_is_equivalent_even_if_it_is_distinguishable_from_0():
    assert judged(0.5 + NOISE, 2.0).word == "equivalent" and judged(0.5 + NOISE).word == "better"


def test_with_a_margin_the_needed_seeds_may_show_equivalence():
    verdict = judged(NOISE, 0.2)
    needed, noise = 5 + verdict.more_seeds, verdict.comparison.noise
    assert equivalence_power(0.2, needed - 1, noise) < 0.8 <= equivalence_power(0.2, needed, noise)


def test_few_records_are_an_obstacle_that_more_seeds_do_not_remove():
    rng = np.random.default_rng(1)
    by_record = rng.normal(size=20)
    table = by_record + 0.01 * rng.normal(size=(5, 20))
    changes = (table - table.mean(axis=1, keepdims=True)) / 19
    arms = {
        "new": made_outcomes(table.mean(axis=1), changes),
        "old": made_outcomes(np.zeros(5), np.zeros((5, 20))),
    }
    verdict = judge(made_study(list(arms), 5), made_findings(arms))[0]
    assert verdict.word == "not known" and verdict.more_seeds is None
    assert "because of the few test records" in verdict.text and "20 test records" in verdict.text


def declared_study(p_like):
    """Returns the verdicts of a primary and two declared contrasts whose differences are `p_like` spreads."""
    arms = {name: made_outcomes(3 - shift * 0.29 - NOISE) for name, shift in zip("abc", p_like, strict=True)}
    arms["base"] = made_outcomes(np.full(5, 3.0))
    contrasts = [Contrast(BITS.name, name, "base") for name in "abc"]
    study = made_study(list(arms), 5, primary=contrasts[0], declared=tuple(contrasts[1:]))
    return judge(study, made_findings(arms)), planned_level(study)


def test_holm_corrects_the_primary_and_the_declared_contrasts():
    verdicts, level = declared_study([1.7, 9, 0])
    assert level == pytest.approx(0.05 / 3)
    assert [v.role for v in verdicts] == ["primary", "declared", "declared"]
    assert [v.level for v in verdicts] == pytest.approx([0.05 / 2, 0.05 / 3, 0.05])
    assert [v.word for v in verdicts] == ["better", "better", "not known"]
    assert "97.5 % interval" in verdicts[0].text


def test_other_contrasts_are_exploratory_and_have_no_word():
    arms = {name: made_outcomes(np.full(5, 3.0) - shift - NOISE) for name, shift in {"a": 5, "b": 0, "c": 5}.items()}
    study = made_study(list(arms), 5, measures=(BITS, SPEED))
    findings = made_findings(arms)
    findings.outcomes[SPEED.name] = {name: made_outcomes(10 + NOISE * i) for i, name in enumerate(arms)}
    verdicts = judge(study, findings)
    assert [(v.contrast.measure, v.contrast.one, v.word) for v in verdicts[1:]] == [
        (BITS.name, "c", ""), (SPEED.name, "a", ""), (SPEED.name, "c", ""),
    ]  # fmt: skip
    assert all(v.role == "exploratory" and "exploratory" in v.text for v in verdicts[1:])


@pytest.mark.parametrize("shift, word", [(5, "better"), (0, "not known")])
def test_a_verdict_with_seeds_that_were_added_says_so(shift, word):
    arms = {"new": made_outcomes(3 - shift - NOISE), "old": made_outcomes(np.full(5, 3.0))}
    findings = made_findings(arms, changes=["final.seeds increased after the start from 3 to 5"])
    verdict = judge(made_study(list(arms), 5), findings)[0]
    assert verdict.word == word
    assert ("Seeds were added after a first result" in verdict.text) == (word == "better")


def test_missing_seeds_leave_the_question_open():
    arms = {"new": made_outcomes(3 - 5 - NOISE[:4]), "old": made_outcomes(np.full(5, 3.0))}
    verdict = judge(made_study(list(arms), 5), made_findings(arms))[0]
    assert verdict.word == "not known" and "4 of 5 seeds are finished" in verdict.text


def test_an_unfinished_choice_of_a_measure_prevents_its_verdicts():
    arms = {"new": made_outcomes(3 - 5 - NOISE), "old": made_outcomes(np.full(5, 3.0))}
    choices = {"old": {"learning_rate": 0.1, "unfinished": "the best learning rate 0.1 is at the edge of its grid"}}
    for measure, word in ((BITS.name, "tuning not finished"), ("other", "better")):
        found = judge(made_study(list(arms), 5), made_findings(arms, choices={measure: choices}))[0]
        assert found.word == word


def test_unfinished_tuning_prevents_a_verdict():
    arms = {"new": made_outcomes(3 - 5 - NOISE), "old": made_outcomes(np.full(5, 3.0))}
    findings = made_findings(arms, unfinished={"new": "the best learning rate is the largest"})
    verdict = judge(made_study(list(arms), 5), findings)[0]
    assert verdict.word == "tuning not finished" and "the best learning rate is the largest" in verdict.text


def test_a_study_without_results_has_no_verdict():
    verdict = judge(made_study(["new", "old"], 5), made_findings({}))[0]
    assert verdict.word == "not known" and "0 of 5 seeds are finished" in verdict.text


def test_a_group_sequential_study_is_judged_at_its_first_decided_look():
    differences = np.concatenate([9 + NOISE, -9 + NOISE])  # A later look would not decide.
    verdict = judged(differences, stop=Stop("group_sequential", 2))
    assert verdict.word == "better" and verdict.comparison.seeds == (0, 1, 2, 3, 4) and verdict.level < 0.01


def test_between_looks_the_last_look_counts():
    arms = {"new": made_outcomes(3 - 0.1 - np.tile(NOISE, 2)[:8]), "old": made_outcomes(np.full(10, 3.0))}
    study = made_study(list(arms), 10, stop=Stop("group_sequential", 2))
    assert judge(study, made_findings(arms))[0].comparison.seeds == (0, 1, 2, 3, 4)


def test_larger_throughput_is_better():
    arms = {"new": made_outcomes(1000 + 1000 * NOISE), "old": made_outcomes(np.zeros(5))}
    study = made_study(list(arms), 5, measures=(SPEED,), primary=Contrast(SPEED.name, "new", "old"))
    verdict = judge(study, made_findings(arms, SPEED.name))[0]
    assert verdict.word == "better" and "by 1,000 tokens per second (95 % interval" in verdict.text
