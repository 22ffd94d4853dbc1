"""Tests the plan of a run in phases: the memory of the largest phase, and the hours and the price of all phases."""

import dataclasses

import pytest

from pretrainax.config import Phase, UserError, phases_of
from pretrainax.data.sources import PythonDocs
from pretrainax.planning import report, search
from pretrainax.planning.topologies import Topology
from tests.support import tiny

TOPOLOGY = Topology.parse("v5e:2x2")


@pytest.fixture(scope="module")
def experiment():
    experiment = tiny.get_config("gpt")
    experiment.data.source = PythonDocs()
    experiment.phases = (Phase(steps=30, sequence_length=16), Phase(steps=6, global_batch_size=64), Phase())
    return experiment


@pytest.fixture(scope="module")
def candidate(experiment):
    return search.estimate_run(experiment, TOPOLOGY)


@pytest.mark.slow
def test_memory_is_that_of_the_largest_and_hours_and_price_add_up(experiment, candidate):
    alone = []
    for phase in phases_of(experiment):
        train = dataclasses.replace(phase.experiment.train, steps=phase.steps)
        alone.append(search.estimate_run(dataclasses.replace(phase.experiment, train=train), TOPOLOGY))
    assert candidate.memory == alone[1].memory and alone[1].memory.total == max(c.memory.total for c in alone)
    assert candidate.roofline.hours == pytest.approx(sum(c.roofline.hours for c in alone))
    assert candidate.roofline.price == pytest.approx(sum(c.roofline.price for c in alone))
    assert candidate.largest.experiment.train.global_batch_size == 64 and candidate.experiment is experiment


@pytest.mark.slow
def test_the_report_has_a_row_for_each_phase(candidate):
    text = report.run_report("tiny", candidate, TOPOLOGY, None, "not compiled")
    rows = [line.split(maxsplit=2) for line in text.splitlines() if line.startswith("  phase ")]
    assert [row[1] for row in rows] == ["1", "2", "3"]
    assert rows[0][2].startswith("steps 1 to 30: sequence_length 16; ") and "fits" in rows[0][2]
    flops = sum(phase.steps * one.roofline.flops for phase, one in candidate.phases)
    assert f"per step of phase 2, {flops:.3g} in total" in text


@pytest.mark.slow
def test_a_phase_that_no_mesh_divides_is_named(experiment):
    odd = dataclasses.replace(experiment, phases=(Phase(share=0.5), Phase(global_batch_size=6)))
    with pytest.raises(UserError, match=r"phase 2 of config.phases \(global_batch_size 6\): .*global_batch_size 6"):
        search.estimate_run(odd, TOPOLOGY)
