"""Configs can select a class of a user's package; config.json records it, and another process finds it again."""

import json
import pathlib
import subprocess
import sys

import pytest

from pretrainax import config as config_lib
from pretrainax.config import Choice, UserError
from tests.support import tiny

ROOT = pathlib.Path(__file__).parents[2]
OPTIMIZER = """
import dataclasses
import pathlib

from pretrainax.optim import AdamW

pathlib.Path(__file__).with_suffix(".imported").touch()


@dataclasses.dataclass
class Tiger(AdamW):
    sign: float = 1.0
"""
LOAD = "import sys; from pretrainax import config; print(config.load(sys.argv[1]).optimizer)"
PARSE = "import sys; from pretrainax.config import Choice; print(Choice.parse(sys.argv[1]))"


@pytest.fixture
def package(tmp_path):
    """Writes mypackage.optim, which no process has imported, and returns the folder for the path."""
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").touch()
    (tmp_path / "mypackage" / "optim.py").write_text(OPTIMIZER)
    return tmp_path


def install(package: pathlib.Path, entry_point: str) -> None:
    """Writes the metadata that pip would write."""
    metadata = package / "mypackage-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[pretrainax.choices]\n{entry_point}\n")


def run(package: pathlib.Path, code: str, argument: str) -> str:
    """Returns the last line that another process prints, or its error."""
    env = {"PYTHONPATH": f"{ROOT}:{package}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code, argument], env=env, capture_output=True, text=True)
    return (done.stdout or done.stderr).strip().splitlines()[-1]


def config_file(package: pathlib.Path, type_name: str) -> str:
    value = config_lib.to_json(tiny.get_config("gpt"))
    value["optimizer"]["type"] = type_name
    (package / "config.json").write_text(json.dumps(value))
    return str(package / "config.json")


@pytest.mark.slow
def test_an_entry_point_is_found_when_a_config_is_loaded(package):
    install(package, "Tiger = mypackage.optim:Tiger")
    assert run(package, LOAD, config_file(package, "mypackage.optim:Tiger")).startswith("Tiger(learning_rate=")


def test_an_entry_point_is_found_by_its_name_in_a_flag(package):
    install(package, "Tiger = mypackage.optim:Tiger")
    assert "sign=2.0" in run(package, PARSE, "Tiger(sign=2.0)")


def test_what_is_no_entry_point_is_not_imported(package):
    said = run(package, LOAD, config_file(package, "mypackage.optim:Tiger"))
    assert "import mypackage.optim in the config file" in said
    assert "entry point Tiger = mypackage.optim:Tiger in the group pretrainax.choices" in said
    assert not (package / "mypackage" / "optim.imported").exists()


@pytest.mark.parametrize("module", ["__main__", "config_config"])
def test_a_class_of_a_script_or_config_file_is_to_be_moved_to_a_package(module, package):
    said = run(package, LOAD, config_file(package, f"{module}:Tiger"))
    assert "move the class to a package with the entry point Tiger = MODULE:Tiger" in said
    assert f"replace '{module}:Tiger' in config.json by MODULE:Tiger" in said


def test_what_is_imported_already_needs_no_entry_point(package):
    path = config_file(package, "mypackage.optim:Tiger")
    assert run(package, f"import mypackage.optim; {LOAD}", path).startswith("Tiger(learning_rate=")


def test_an_entry_point_that_cannot_be_imported_is_named(package):
    install(package, "Panther = mypackage.optim:Panther")
    said = run(package, LOAD, config_file(package, "mypackage.optim:Panther"))
    assert "entry point Panther = mypackage.optim:Panther cannot be imported" in said


def test_an_entry_point_that_is_no_choice_is_refused(package):
    install(package, "join = os.path:join")
    assert "choice 'os.path:join' belongs to a package" in run(package, LOAD, config_file(package, "os.path:join"))


def test_json_names_a_class_of_this_package_by_itself_and_others_by_their_module():
    class Tiger(type(tiny.get_config("gpt").optimizer)):
        pass

    experiment = tiny.get_config("gpt")
    assert config_lib.to_json(experiment.optimizer)["type"] == "AdamW"
    assert config_lib.to_json(Tiger())["type"] == f"{__name__}:{Tiger.__qualname__}"


def test_a_class_of_the_same_name_does_not_take_the_place_of_a_built_in_one():
    built_in = Choice.named("AdamW")
    type("AdamW", (built_in,), {"__module__": "elsewhere", "__dataclass_fields__": built_in.__dataclass_fields__})
    assert Choice.named("AdamW") is built_in
    assert Choice.named("elsewhere:AdamW").__module__ == "elsewhere"


def test_a_choice_of_another_kind_is_refused_with_the_field():
    value = config_lib.to_json(tiny.get_config("gpt"))
    value["optimizer"] = {"type": "WarmupLinear"}
    with pytest.raises(UserError, match=r"config\.optimizer is WarmupLinear\(.*\), it must be of kind Optimizer"):
        config_lib.from_json(config_lib.Experiment, value)
