"""Tests reading the tasks of GLUE by the names of their datasets, with the datasets' fields and labels."""

import collections

import datasets
import pytest

from pretrainax.tasks.glue import TASKS
from tests.support.huggingface_datasets import without_network

TRAIN, VALID = 5, 3


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Writes small datasets with GLUE's fields to a folder, with a README that lists its files, as on the hub."""
    root = tmp_path_factory.mktemp("hub")
    lines = ["configs:"]
    for name, named in TASKS.items():
        task, labels = named.task, getattr(named.task, "labels", None)
        kind = datasets.ClassLabel(names=list(labels)) if labels else datasets.Value("float32")
        fields = {name: datasets.Value("string") for name in task.fields[:-1]}
        features = datasets.Features({**fields, "label": kind, "idx": datasets.Value("int32")})
        lines += [f"- config_name: {name}", "  data_files:"]
        for split, count in (("train", TRAIN), (named.source.valid_split, VALID)):
            file = root / "nyu-mll" / "glue" / name / f"{split}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            rows = [{**{f: f"{split} {f} {i}" for f in fields}, "label": i % 2, "idx": i} for i in range(count)]
            datasets.Dataset.from_list(rows, features=features).to_parquet(str(file))
            lines += [f"  - split: {split}", f"    path: {name}/{split}.parquet"]
    (root / "nyu-mll" / "glue" / "README.md").write_text("\n".join(["---", *lines, "---", ""]))
    with pytest.MonkeyPatch.context() as patch:
        without_network(patch, tmp_path_factory.mktemp("cache"))
        patch.chdir(root)  # `datasets` looks for a name here before it contacts the hub
        yield root


@pytest.mark.parametrize("name", ["sst2", "mnli", "stsb"])
def test_a_task_is_read_by_the_name_of_its_set(name, hub):
    named = TASKS[name]
    source = named.source.reading(named.task)
    for split, count in (("train", TRAIN), ("valid", VALID)):
        found = [r for shard in source.shards(split) for r in source.read(shard, collections.Counter())]
        assert len(found) == count
        there = "train" if split == "train" else named.source.valid_split
        assert found[1].texts == tuple(f"{there} {field} 1" for field in named.task.fields[:-1])
        key = "score" if name == "stsb" else "label"
        assert [record.note[key] for record in found] == [i % 2 for i in range(count)]
