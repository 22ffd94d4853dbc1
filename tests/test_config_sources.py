"""The docstring of each config has the paper's corpus as a flag, and the real loader reads it."""

import sys

import datasets
import pytest

from pretrainax.config import Choice
from pretrainax.config.validation import validate
from pretrainax.data.sources import HuggingFace
from tests.support.docs_pages import config_commands
from tests.support.huggingface_datasets import without_network
from tests.support.reading import texts
from tests.support.runs import ROOT, run
from tests.test_configs import VARIANTS, load

# The datasets of the hub in configs: configurations, splits and columns, from their pages.
HUB = {
    "HuggingFaceFW/fineweb": (("default", "sample-350BT"), ("train",), ("text", "id", "dump", "url")),
    "HuggingFaceFW/fineweb-edu": (("default",), ("train",), ("text", "id", "dump", "url", "score")),
    "Skylion007/openwebtext": (("plain_text",), ("train",), ("text",)),
    "allenai/OLMoE-mix-0924": (("default",), ("train",), ("id", "text", "added", "created")),
    "allenai/olmo-mix-1124": (("default",), ("train",), ("id", "text", "added", "created")),
    "allenai/c4": (("en", "realnewslike"), ("train", "validation"), ("text", "timestamp", "url")),
    "dvruette/lm1b": (("default",), ("train", "test"), ("text",)),
    "manu/project_gutenberg": (("default",), ("en", "de"), ("id", "text")),
    "wikimedia/wikipedia": (("20231101.en", "20231101.de"), ("train",), ("id", "url", "title", "text")),
    "wmt/wmt14": (("de-en", "fr-en"), ("train", "validation", "test"), ("translation",)),
}
USUAL = (("default",), ("train",), ("text", "id"))  # for all other datasets
# The other configs contain their corpus.
PAPERS = [name for name in VARIANTS if name not in ("finetune", "quickstart", "shakespeare_char")]
RECORDS = 60


def source(name: str):
    (words,) = config_commands(name)
    (flag,) = [word for word in words if word.startswith("--config.data.source=")]
    return Choice.parse(flag.partition("=")[2])


def record(column: str, i: int, split: str):
    return {"en": f"{split} {i}", "de": f"{split} {i} auf Deutsch"} if column == "translation" else f"{split} {i}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Writes a folder with a small dataset of each shape, with the metadata of the hub in its README."""
    root = tmp_path_factory.mktemp("hub")
    named = {component.path for name in PAPERS for component in source(name).components()}
    for name, (configurations, splits, columns) in (dict.fromkeys(named, USUAL) | HUB).items():
        lines = ["configs:"]
        for configuration in configurations:
            lines += [f"- config_name: {configuration}", "  data_files:"]
            for split in splits:
                file = root / name / configuration / f"{split}.parquet"
                file.parent.mkdir(parents=True, exist_ok=True)
                rows = [{c: record(c, i, f"{configuration} {split}") for c in columns} for i in range(RECORDS)]
                datasets.Dataset.from_list(rows).to_parquet(str(file))
                lines += [f"  - split: {split}", f"    path: {configuration}/{split}.parquet"]
        (root / name / "README.md").write_text("\n".join(["---", *lines, "---", ""]))
    with pytest.MonkeyPatch.context() as patch:
        without_network(patch, tmp_path_factory.mktemp("cache"))
        patch.chdir(root)  # `datasets` searches this folder before the hub
        yield root


@pytest.mark.first(10)
@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_text_is_a_flag_that_the_loader_reads(name, hub):
    experiment = load(name, "")
    pairs = experiment.data.source.pairs
    experiment.data.source = source(name)
    validate(experiment)
    for component in experiment.data.source.components():
        assert isinstance(component, HuggingFace) and component.fingerprint()
        train, valid = (texts(component, split) for split in ("train", "valid"))
        assert train and all(isinstance(document, tuple) == pairs for document in train + valid)
        assert not {*train} & {*valid}
        if component.valid_split is not None:
            assert (len(train), len(valid)) == (RECORDS, RECORDS)
        configuration, split = (component.name or HUB.get(component.path, USUAL)[0][0]), component.train_split
        first = train[0][0] if pairs else train[0]
        assert first.startswith(f"{configuration} {split} ")


def test_a_mixture_has_a_weight_for_each_of_its_sources():
    ((start, weights),) = source("roberta_base").weight_stages([RECORDS] * 4)
    assert start == 0.0 and weights == pytest.approx([w / 130 for w in (12, 4, 76, 38)])


@pytest.mark.slow
def test_the_flag_is_read_by_the_command_as_it_stands_in_the_docstring():
    (words,) = config_commands("bert_base")
    done = run([sys.executable, *words[1:], "--help"])
    assert done.returncode == 0, done.stderr
    assert f'--config.data.source="{source("bert_base")}"' in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_base", "transformer"])
def test_the_header_is_given_the_flag_in_one_line(name):
    script = "import sys\nfrom pretrainax import cli\ndef main():\n    return print(cli.paper_source())\ncli.run(main)"
    done = run([sys.executable, "-c", script, f"--config={ROOT}/configs/{name}.py"])
    (line,) = done.stdout.splitlines()
    assert Choice.parse(line) == source(name) and "( " not in line
