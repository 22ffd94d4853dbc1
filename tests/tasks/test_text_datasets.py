"""Tests reading text tasks by the names of their datasets, with the datasets' fields."""

import collections

import datasets
import pytest

from pretrainax.tasks.text_datasets import TASKS
from tests.support.huggingface_datasets import without_network

ROWS = {
    "xsum": {"document": "It rains.", "summary": "Rain.", "id": "1"},
    "cnn_dailymail": {"article": "It rains.", "highlights": "Rain.", "id": "1"},
    "samsum": {"id": "1", "dialogue": "A: It rains.", "summary": "Rain."},
    "alpaca": {"instruction": "Say it.", "input": "It rains.", "output": "Rain.", "text": "all of it"},
    "dolly": {"instruction": "Say it.", "context": "", "response": "Rain.", "category": "open_qa"},
    "natural_questions": {"query": "who rains", "answer": "It rains."},
    "msmarco": {"query": "who rains", "positive": "It rains.", "negative": "It does not."},
}
READ = {
    "xsum": ("summarize: It rains.", "", "Rain."),
    "cnn_dailymail": ("summarize: It rains.", "", "Rain."),
    "samsum": ("summarize: A: It rains.", "", "Rain."),
    "alpaca": ("Say it.\n\nIt rains.", "Rain."),
    "dolly": ("Say it.", "Rain."),
    "natural_questions": ("who rains", "It rains."),
    "msmarco": ("who rains", "It rains.", "It does not."),
}


@pytest.mark.first(3)
@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_read_by_the_name_of_its_set(name, tmp_path, monkeypatch):
    named = TASKS[name]
    folder = tmp_path / named.source.path
    folder.mkdir(parents=True)
    splits = ("train", *filter(None, [named.source.valid_split]))
    for split in splits:
        datasets.Dataset.from_list([ROWS[name]] * 2).to_parquet(str(folder / f"{split}.parquet"))
    lines = [f"- config_name: {named.source.name or 'default'}", "  data_files:"]
    lines += [line for split in splits for line in (f"  - split: {split}", f"    path: {split}.parquet")]
    (folder / "README.md").write_text("\n".join(["---", "configs:", *lines, "---", ""]))
    without_network(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)  # `datasets` looks for a name here before it contacts the hub
    source = named.source.reading(named.task)
    shard, *_ = source.shards("valid" if named.source.valid_split else "train")
    source.valid_fraction = 0.0
    assert [record.texts for record in source.read(shard, collections.Counter())] == [READ[name]] * 2
