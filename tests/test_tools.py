"""The scripts that select tests and plant faults match the current code."""

import pathlib

import pytest

from tests.affected import ROOT, affected
from tests.planted_faults import FAULTS, checked_by_default


@pytest.mark.slow
def test_a_change_can_break_what_imports_it_and_what_runs_it():
    of_scoring, of_layers = set(affected(["scoring"])), set(affected(["layers/norm.py"]))
    assert {"tests/scoring/test_scoring_examples.py", "tests/test_evaluate.py"} <= of_scoring
    assert not {"tests/layers/test_norm.py", "tests/data/test_packing.py"} & of_scoring
    assert {"tests/layers/test_norm.py", "tests/zoo/test_golden_steps.py", "tests/test_main.py"} <= of_layers
    assert "tests/data/objectives/test_causal.py" not in of_layers


def test_what_is_no_part_of_the_package_is_named():
    with pytest.raises(SystemExit, match="layrs: no part of the package"):
        affected(["layrs"])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place(fault):
    assert (ROOT / "pretrainax" / fault.file).read_text().count(fault.right) == 1 and fault.right != fault.wrong


def test_make_check_runs_files_that_are_there():
    assert [name for name in checked_by_default() if not pathlib.Path(ROOT, name.partition("::")[0]).exists()] == []
