"""Tests that the search proposes configs that fit by its own estimate, with no larger change than necessary."""

import dataclasses
import math
from typing import get_args

import pytest

from pretrainax.config import MixtureOfExperts, UserError
from pretrainax.config.experiment import Remat
from pretrainax.planning import current_devices, search
from pretrainax.planning.memory import MARGIN
from pretrainax.planning.search import best, estimate_run, remedies, remedies_on_larger_topology
from pretrainax.planning.topologies import Topology
from tests.support import tiny
from tests.support.tiers import few

FOUR = Topology.parse("v5e:2x2")


def with_memory(topology, share, experiment):
    """Returns the topology with chips that have `share` times the memory that `experiment` needs."""
    needed = estimate_run(experiment, topology).memory.total
    return dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, memory_bytes=int(needed * share)))


def large(family="gpt"):
    experiment = tiny.get_config(family)
    experiment.train.global_batch_size = 1024
    return experiment


@pytest.mark.slow
def test_each_mesh_has_the_policy_that_makes_it_fastest():
    experiment = large()
    experiment.train.remat = "block"
    found = best(experiment, FOUR)
    for candidate in found:
        run = candidate.experiment
        others = (dataclasses.replace(run, train=dataclasses.replace(run.train, remat=x)) for x in get_args(Remat))
        assert candidate.roofline.seconds == min(estimate_run(other, FOUR).roofline.seconds for other in others)
    assert found[0].roofline.seconds <= estimate_run(experiment, FOUR).roofline.seconds


@pytest.mark.slow
def test_what_does_not_fit_is_tried_on_more_devices():
    experiment = tiny.get_config("gpt")
    small = with_memory(FOUR, 0.25, experiment)
    assert remedies(experiment, small) == []
    larger, found = remedies_on_larger_topology(experiment, small)
    assert larger.shape == (2, 4) and found[0].fits


@pytest.mark.slow
def test_meshes_that_fit_come_first_and_the_fastest_of_them_first():
    found = best(large(), FOUR)
    assert len(found) == 6 + 3  # data x fsdp x tensor on 4 devices, and on 2 devices with 2 stages of one layer each
    assert [c.roofline.seconds for c in found if c.fits] == sorted(c.roofline.seconds for c in found if c.fits)


def test_a_little_too_much_is_cured_by_rematerialisation_alone():
    experiment = large()
    first = remedies(experiment, with_memory(FOUR, 1.0, experiment))[0]
    assert first.flags(experiment) in ("--config.train.remat=dots", "--config.train.remat=block")


@pytest.mark.first(1)
@pytest.mark.parametrize("family", few(["gpt", "t5", "bert"], ["gpt", "t5"]))
@pytest.mark.parametrize("share", few([0.9, 0.4, 0.2], [0.4]))
def test_what_it_proposes_fits_and_each_later_proposal_is_faster(family, share):
    experiment = large(family)
    topology = with_memory(FOUR, share, experiment)
    found = remedies(experiment, topology)
    assert found
    times = [c.roofline.seconds for c in found]
    assert times == sorted(times, reverse=True)
    for candidate in found:
        assert estimate_run(candidate.experiment, topology).memory.fits(topology.chip)
        assert candidate.flags(experiment)


def test_what_no_mesh_holds_has_no_remedy_and_is_not_searched(monkeypatch):
    experiment = large()
    topology = with_memory(FOUR, 1e-3, experiment)
    monkeypatch.setattr(search, "estimate_run", None)
    assert remedies(experiment, topology) == []


@pytest.mark.slow
def test_meshes_that_are_left_out_have_no_remedy(monkeypatch):
    experiment = tiny.get_config("gpt")  # The state needs more memory than the activations.
    topology = with_memory(FOUR, 0.5, experiment)
    meshes = list(search._meshes(experiment, topology))
    assert {search._can_fit(experiment, topology, mesh) for mesh in meshes} == {True, False}
    found = remedies(experiment, topology)
    monkeypatch.setattr(search, "_can_fit", lambda *arguments: True)
    assert found == remedies(experiment, topology)


def test_flags_say_what_differs():
    experiment = large()
    changed = estimate_run(dataclasses.replace(experiment, mesh=dataclasses.replace(experiment.mesh, fsdp=2)), FOUR)
    assert changed.flags(experiment) == "--config.mesh.fsdp=2"


def test_slices_must_be_those_of_the_topology():
    with pytest.raises(UserError, match="config.mesh.slices is 1, but 2[*]v5e:2x2 has 2; set it to that"):
        estimate_run(large(), Topology.parse("2*v5e:2x2"))


def test_a_mesh_of_another_number_of_devices_is_one_clear_line():
    experiment = large()
    experiment.mesh.fsdp = 3
    with pytest.raises(UserError, match="the product must be the number of devices, which is 4"):
        estimate_run(experiment, FOUR)


@pytest.mark.slow
def test_stages_are_tried_where_they_divide_the_layers_of_a_dense_decoder():
    experiment = large()
    found = best(experiment, FOUR)
    assert {candidate.sizes["pipeline"] for candidate in found} == {1, 2}  # The model has 2 layers.
    assert any("--config.mesh.pipeline=2" in candidate.flags(experiment) for candidate in found)
    for sizes in found[0].experiment.mesh, dataclasses.replace(experiment.mesh, pipeline=2):
        schedules = {way.get("pipeline_schedule") for way in search._train_field_choices(sizes)}
        assert schedules == ({None} if sizes.pipeline == 1 else {"gpipe", "1f1b"})
    train = dataclasses.replace(experiment.train, pipeline_schedule="1f1b")
    changed = estimate_run(dataclasses.replace(experiment, train=train), FOUR)
    assert changed.flags(experiment) == "--config.train.pipeline_schedule=1f1b"
    assert {candidate.sizes["pipeline"] for candidate in best(large("bert"), FOUR)} == {1}


@pytest.mark.slow
def test_experts_are_split_as_they_divide():
    experiment = large()
    experiment.model.experts = MixtureOfExperts(num_experts=6, top_k=2)
    assert {candidate.experiment.mesh.expert for candidate in best(experiment, FOUR)} == {1, 2}


# --- remat=auto ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "dots", "block"])
def test_auto_is_the_first_policy_that_fits(policy, monkeypatch):
    """Tests chips with exactly the memory of a policy; if no policy fits, the result is "block"."""
    experiment = tiny.get_config("gpt")
    topology = Topology.parse("v5e:2x2")
    needed = {}
    for remat in ("none", "dots", "block"):
        needed[remat] = estimate_run(_with(experiment, remat), topology).memory.total
    assert needed["none"] > needed["dots"] > needed["block"]
    chip = dataclasses.replace(topology.chip, memory_bytes=math.ceil(needed[policy] / MARGIN))
    fitting = dataclasses.replace(topology, chip=chip)
    found = estimate_run(_with(experiment, "auto"), fitting)
    assert (found.experiment.train.remat, found.fits) == (policy, True)
    none = dataclasses.replace(topology, chip=dataclasses.replace(topology.chip, memory_bytes=1000))
    assert estimate_run(_with(experiment, "auto"), none).experiment.train.remat == "block"


def test_a_config_that_is_assessed_stays_auto_and_one_that_is_settled_does_not():
    experiment = _with(tiny.get_config("gpt"), "auto")
    estimate_run(experiment, Topology.parse("v5e:2x2"))
    assert experiment.train.remat == "auto"
    search.resolve_remat(experiment, Topology.parse("v5e:2x2"))
    assert experiment.train.remat == "none"


def test_the_devices_of_a_program_settle_it(monkeypatch):
    experiment = _with(tiny.get_config("gpt"), "auto")
    current_devices.ResolveRemat().resolve_fields(experiment)
    assert experiment.train.remat == "auto"  # The planner does not know CPUs; layers treat "auto" as "none".
    monkeypatch.setattr(current_devices, "current_topology", lambda: Topology.parse("h100:8"))
    current_devices.ResolveRemat().resolve_fields(experiment)
    assert experiment.train.remat == "none"


def _with(experiment, remat):
    return dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, remat=remat))
