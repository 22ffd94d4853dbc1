"""Apache Beam's local runner writes the same files as one call of `prepare`."""

import os
import pathlib
import subprocess
import sys

import pytest

import pretrainax

ROOT = os.path.dirname(os.path.dirname(pretrainax.__file__))

CONFIG = """
from pretrainax.config import DataConfig, Experiment, ModelConfig
from pretrainax.data.objectives import CausalLM
from pretrainax.data.sources import JsonLines
from pretrainax.optim import AdamW, WarmupCosine
from pretrainax.tokenization import ByteBPE

def get_config(variant=""):
    source = JsonLines("lines", valid_fraction=0.3)
    data = DataConfig(source, sequence_length=16, drop_duplicates=True)
    return Experiment(ModelConfig(vocab_size=512), ByteBPE(vocab_size=270), data, CausalLM(), AdamW(), WarmupCosine(5))
"""


def command(tmp_path, module, *flags):
    return subprocess.run(
        [sys.executable, "-m", f"pretrainax.{module}", "--config=config.py", *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "lines").mkdir()
    for i in range(6):
        lines = [f'{{"text": "file {i * (j % 3)} document {j}"}}\n' for j in range(10)]
        (tmp_path / "lines" / f"{i}.jsonl").write_text("".join(lines))
    return tmp_path


def contents(folder):
    files = [f for f in pathlib.Path(folder).rglob("*") if f.is_file() and f.suffix != ".lock"]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


def test_beam_writes_the_same_files(folder):
    # Beam requires pyarrow < 26 and protobuf < 7, which are older than the versions in constraints.txt.
    pytest.importorskip("apache_beam", reason="apache_beam is not installed: pip install 'pretrainax[beam]'")
    beam_flags = ("--runner=DirectRunner", "--direct_num_workers=2", "--direct_running_mode=multi_processing")
    done = command(folder, "prepare_beam", "--config.data.cache_dir=beam", *beam_flags)
    assert done.returncode == 0, done.stderr
    plain = command(folder, "prepare", "--config.data.cache_dir=plain")
    assert plain.returncode == 0, plain.stderr
    wanted = contents(folder / "plain")
    assert any(name.endswith("00005.tokens") for name in wanted)
    assert contents(folder / "beam") == wanted


@pytest.mark.parametrize(
    "flag, said",
    [("--runner=Nope", "Unexpected pipeline runner"), ("--direct_num_workers=x", "invalid int value: 'x'")],
)
def test_a_bad_flag_of_beam_gets_one_line_before_the_work(folder, flag, said):
    pytest.importorskip("apache_beam", reason="apache_beam is not installed: pip install 'pretrainax[beam]'")
    done = command(folder, "prepare_beam", "--config.data.cache_dir=beam", flag)
    assert done.returncode == 2 and not (folder / "beam").exists()
    assert "pretrainax: Beam cannot use these flags: " in done.stderr and said in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_without_beam_a_line_says_what_to_install(folder):
    (folder / "apache_beam.py").write_text("raise ModuleNotFoundError(name='apache_beam')")
    done = command(folder, "prepare_beam", "--runner=DirectRunner")
    assert done.returncode == 2
    assert done.stderr == "pretrainax: prepare_beam needs the package apache-beam: pip install 'pretrainax[beam]'\n"
