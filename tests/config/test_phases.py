"""Tests the phases of a run: their configs, their lengths, and invalid phases."""

import json

import pytest

from pretrainax import config as config_lib
from pretrainax.config import (
    Experiment,
    Phase,
    RotaryPositions,
    UserError,
    config_at_checkpoint,
    phase_at,
    phases_of,
    resolve_auto,
)
from pretrainax.config.overrides import set_field
from pretrainax.config.validation import validate
from pretrainax.data.objectives import CausalLM, MaskedLM
from pretrainax.data.sources import PythonDocs, SourceMixture
from pretrainax.optim import Muon
from pretrainax.scaling.small import SIZES, scale_down
from tests.support import tiny


def make(*phases: Phase, steps: int = 40, variant: str = "bert") -> Experiment:
    experiment = tiny.get_config(variant)
    experiment.data.source, experiment.train.steps, experiment.phases = PythonDocs(), steps, phases
    return experiment


def stops(*phases: Phase, steps: int = 40) -> list[int]:
    return [phase.stop for phase in phases_of(make(*phases, steps=steps))]


# --- configs of phases -----------------------------------------------------------------------------------------------


def test_a_run_without_phases_is_one_phase_and_the_very_same_config():
    experiment = make()
    (only,) = phases_of(experiment)
    assert (only.number, only.start, only.stop, only.changes) == (1, 0, 40, "")
    assert only.experiment is experiment and config_at_checkpoint(experiment, [3]) is experiment


def test_a_phase_changes_both_learning_rates_of_muon_by_the_same_factor():
    experiment = make(Phase(share=0.5), Phase(learning_rate=0.01))
    experiment.optimizer = Muon(learning_rate=0.04, adam_learning_rate=0.02)
    first, last = (part.experiment.optimizer for part in phases_of(experiment))
    assert first == experiment.optimizer == Muon(learning_rate=0.04, adam_learning_rate=0.02)
    assert last == Muon(learning_rate=0.01, adam_learning_rate=0.005)
    # In this case, learning_rate applies to both.
    experiment.optimizer = Muon(learning_rate=0.04, adam_learning_rate=None)
    assert phases_of(experiment)[1].experiment.optimizer == Muon(learning_rate=0.01, adam_learning_rate=None)


def test_each_field_of_a_phase_is_one_of_the_config_which_stays_as_it_is():
    mixture = SourceMixture(sources=(PythonDocs(), PythonDocs()), temperature=2.0, stages=((0.5, (1, 0)),))
    phase = Phase(
        share=0.5,
        sequence_length=16,
        global_batch_size=4,
        accumulate=2,
        learning_rate=1e-5,
        dropout_rate=0.2,
        attention_dropout_rate=0.3,
        theta=5e5,
        source=mixture,
        weights=(3.0, 1.0),
        objective=MaskedLM(rate=0.3),
    )
    experiment = make(phase, Phase())
    experiment.model.position = RotaryPositions(max_length=64)
    before = config_lib.dump(experiment)
    first, last = (part.experiment for part in phases_of(experiment))
    assert (first.data.sequence_length, first.train.global_batch_size, first.train.accumulate) == (16, 4, 2)
    assert (first.optimizer.learning_rate, first.model.dropout_rate, first.model.position.theta) == (1e-5, 0.2, 5e5)
    assert first.model.attention_dropout_rate == 0.3
    assert first.objective == MaskedLM(rate=0.3) and first.train.steps == 40 and first.phases == ()
    # The weights apply to the whole phase.
    assert first.data.source == SourceMixture(sources=mixture.sources, weights=(3.0, 1.0))
    assert first.data.source.config_path == "config.phases[0].source"
    experiment.phases = ()
    assert last == experiment
    experiment.phases = (phase, Phase())
    assert config_lib.dump(experiment) == before


def test_json_and_flags_give_the_same_phases_back():
    phases = (Phase(tokens=1e3, sequence_length=16), Phase(objective=MaskedLM(rate=0.3)))
    experiment = make(*phases)
    assert config_lib.from_json(Experiment, json.loads(config_lib.dump(experiment))) == experiment
    flagged = make()
    set_field(flagged, "config.phases", "(Phase(tokens=1e3, sequence_length=16), Phase(objective=MaskedLM(rate=0.3)))")
    assert flagged == experiment
    set_field(flagged, "config.phases", "()")
    assert flagged.phases == ()


def test_an_old_config_without_phases_is_read():
    old = config_lib.to_json(make())
    del old["phases"], old["checkpoint"]["keep_at"]
    assert config_lib.from_json(Experiment, old) == make()


def test_differences_name_the_field_of_the_phase():
    old, new = make(Phase(share=0.5), Phase()), make(Phase(share=0.6), Phase())
    assert config_lib.differences(old, new) == ["phases[0].share: 0.5 -> 0.6"]
    assert config_lib.differences(old, make()) == ["phases: (Phase(share=0.5), Phase()) -> ()"]


# --- lengths ---------------------------------------------------------------------------------------------------------


def test_lengths_in_steps_tokens_and_shares():
    assert stops(Phase(steps=30), Phase()) == [30, 40]
    assert stops(Phase(steps=30), Phase(steps=10)) == [30, 40]
    # 8 rows of 32 tokens. The phase completes its last step.
    assert stops(Phase(tokens=8 * 32 * 5 + 1), Phase()) == [6, 40]
    assert stops(Phase(tokens=8 * 16 * 5, sequence_length=16), Phase()) == [5, 40]
    assert stops(Phase(share=0.9), Phase()) == [36, 40]
    assert stops(Phase(share=0.9), Phase(), steps=1_000_000) == [900_000, 1_000_000]


@pytest.mark.parametrize("steps", range(3, 60))
def test_shares_leave_each_phase_a_step_and_add_up(steps):
    found = stops(Phase(share=0.05), Phase(share=0.9), Phase(share=0.05), steps=steps)
    assert found[-1] == steps and 0 < found[0] < found[1] < found[2]


def test_the_phase_of_a_step():
    phases = phases_of(make(Phase(steps=30), Phase()))
    assert [phase_at(phases, step).number for step in (-1, 0, 29, 30, 39, 40)] == [1, 1, 1, 2, 2, 2]


# --- phases of checkpoints -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_of_the_phase_that_made_its_last_update():
    experiment = make(Phase(steps=30, theta=5e5), Phase())
    experiment.model.position = RotaryPositions(max_length=64)
    thetas = {step: config_at_checkpoint(experiment, [step]).model.position.theta for step in (0, 1, 30, 31, 40)}
    assert thetas == {0: 5e5, 1: 5e5, 30: 5e5, 31: 1e4, 40: 1e4}
    assert config_at_checkpoint(experiment, [31, 40]).phases == ()


def test_checkpoints_whose_models_compute_otherwise_have_no_average():
    experiment = make(Phase(steps=30, theta=5e5), Phase())
    experiment.model.position = RotaryPositions(max_length=64)
    with pytest.raises(UserError, match="the checkpoints 20, 40 are from phases with different positions"):
        config_at_checkpoint(experiment, [20, 40])


# --- consequences for other fields -----------------------------------------------------------------------------------


def test_auto_positions_are_those_of_the_longest_phase():
    experiment = make(Phase(share=0.5), Phase(sequence_length=48))
    experiment.model.position.max_length = config_lib.AUTO
    resolve_auto(experiment, 512)
    assert experiment.model.position.max_length == 48
    assert [phase.experiment.model.position.max_length for phase in phases_of(experiment)] == [48, 48]


def test_a_paper_scaled_down_has_no_phases():
    assert scale_down(make(Phase(share=0.9, sequence_length=16), Phase()), SIZES["tiny"]).phases == ()


# --- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = [
    (
        (Phase(steps=30), Phase(steps=20)),
        "add up to 30 \\+ 20 = 50 steps and config.train.steps is 40: set it to 50, or",
    ),
    ((Phase(steps=40), Phase()), "config.phases before the last have 40 steps, config.train.steps is 40: increase it"),
    ((Phase(share=0.4), Phase(share=0.4)), "add up to 16 \\+ 16 = 32 steps"),
    ((Phase(share=0.9), Phase(share=0.2)), "shares for 44 steps and config.train.steps is 40: reduce a share"),
    ((Phase(share=0.9), Phase(share=0.5), Phase()), "shares for 57 steps and config.train.steps is 40: reduce a share"),
    ((Phase(steps=30), Phase(share=0.5)), "steps and shares for 50 steps and config.train.steps is 40: reduce a share"),
    ((Phase(steps=3, tokens=5), Phase()), r"config.phases\[0\] has steps and tokens: set only one of them"),
    ((Phase(), Phase()), r"config.phases\[0\] has no length: set steps, tokens or share"),
    ((Phase(share=1.0), Phase()), r"config.phases\[0\].share is 1.0, it must be between 0 and 1"),
    ((Phase(steps=0), Phase()), r"config.phases\[0\].steps is 0, it must be at least 1"),
    ((Phase(tokens=-1.0), Phase()), r"config.phases\[0\].tokens is -1.0, it must be at least 1"),
    ((Phase(share=0.5, theta=1e5), Phase()), "theta sets config.model.position.theta, which LearnedPositions does not"),
    ((Phase(share=0.5), Phase(weights=(1, 2))), "weights sets config.data.source.weights, which PythonDocs does not"),
    ((Phase(sequence_length="long"),), r"config.phases\[0\].sequence_length is 'long', it must be of type int or None"),
    ((CausalLM(),), "config.phases is .*, it must be a tuple, each of kind Phase"),
    # Errors in a phase as in a config: the phase, and the usual message.
    (
        (Phase(share=0.5, sequence_length=500), Phase()),
        r"phase 1 of config.phases \(sequence_length 500\): config.data.se",
    ),
    (
        (Phase(share=0.5), Phase(global_batch_size=6, accumulate=4)),
        "phase 2 .*: config.train.global_batch_size 6 is not",
    ),
    ((Phase(share=0.5), Phase(dropout_rate=1.0)), "phase 2 .*: config.model.dropout_rate is 1.0, it must be in"),
    ((Phase(share=0.5), Phase(objective=CausalLM())), "phase 2 .*: config.objective is CausalLM, which trains"),
    ((Phase(share=0.5), Phase(learning_rate=0.0)), "phase 2 .*: config.optimizer.learning_rate is 0.0"),
]


@pytest.mark.parametrize("phases, line", MISTAKES)
def test_a_mistake_is_one_line(phases, line):
    with pytest.raises(UserError, match=line) as refused:
        validate(make(*phases))
    assert "\n" not in str(refused.value) and "; config" not in str(refused.value)


@pytest.mark.parametrize(
    "text, line",
    [
        (
            "(Phase(d_model=3), Phase())",
            "Phase has no field 'd_model', allowed: accumulate, attention_dropout_rate, dropout_rate",
        ),
        ("(Phase(seqence_length=3),)", "did you mean 'sequence_length'"),
        ("AdamW()", "unknown Phase 'AdamW'"),
        ("1,2", "write \\(Name\\(field=value, ...\\), ...\\)"),
        ("Phase(", "cannot read 'Phase\\('"),
        ("(Phase(steps=1.5), Phase())", "Phase.steps is 1.5, it must be of type int or None"),
    ],
)
def test_a_flag_that_is_no_phases_is_one_line(text, line):
    with pytest.raises(UserError, match=line) as refused:
        set_field(make(), "config.phases", text)
    assert "\n" not in str(refused.value)


def test_a_flag_sets_a_field_of_one_phase():
    experiment = make(Phase(share=0.5), Phase())
    set_field(experiment, "config.phases[1].dropout_rate", "0.1")
    assert experiment.phases == (Phase(share=0.5), Phase(dropout_rate=0.1))


@pytest.mark.parametrize(
    "path, line",
    [
        ("config.phases[2].share", r"--config.phases\[2\]: allowed: config.phases\[0\] to \[1\]"),
        ("config.phases[x].share", r"--config.phases\[x\]: allowed: config"),
        ("config.train[0].steps", r"--config.train\[0\]: the field has no items"),
        ("config.phases[0]", r"set the whole tuple: --config.phases=\"\(Phase\(\), ...\)\""),
        ("config.phases[0].d_model", "Phase, which has no field 'd_model'"),
        ("config.phases.share", r"did you mean --config.phases\[0\].share"),
    ],
)
def test_a_flag_for_no_field_of_a_phase_is_one_line(path, line):
    with pytest.raises(UserError, match=line):
        set_field(make(Phase(share=0.5), Phase()), path, "0.5")


@pytest.mark.parametrize("steps, wrong", [((0, 1, 40), ""), ("log", ""), ((41,), "41"), ((-1, 50, 3), "-1, 50")])
def test_checkpoints_are_kept_at_steps_of_the_run(steps, wrong):
    experiment = make()
    experiment.checkpoint.keep_at = steps
    if not wrong:
        validate(experiment)
        return
    with pytest.raises(UserError, match=f"config.checkpoint.keep_at has {wrong}: .* from 0 to config.train.steps, 40"):
        validate(experiment)


def test_steps_to_keep_are_given_one_by_one_or_by_a_word():
    experiment = make()
    for text, expected in (("log", "log"), ("1,10,100", (1, 10, 100)), ("()", ()), ("7", (7,))):
        set_field(experiment, "config.checkpoint.keep_at", text)
        assert experiment.checkpoint.keep_at == expected
    with pytest.raises(UserError, match="keep_at=logs: it must be a tuple, each of type int or 'log'"):
        set_field(experiment, "config.checkpoint.keep_at", "logs")
    experiment.checkpoint.keep_at = "log"
    assert [step for step in range(20) if experiment.checkpoint.keeps(step)] == [0, 1, 2, 4, 8, 16]
    experiment.checkpoint.keep_at = (0, 5)
    assert [step for step in range(20) if experiment.checkpoint.keeps(step)] == [0, 5]
