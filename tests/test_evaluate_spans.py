"""`python -m pretrainax.evaluate --bytes-of-spans` scores models of two families on the same spans."""

import collections
import json
import re
import sys
from typing import Any, NamedTuple

import pytest

from pretrainax import load
from pretrainax.config import UserError
from pretrainax.data.sources import JsonLines
from pretrainax.evaluation import text_scores
from pretrainax.evaluation.command import Evaluation
from pretrainax.scoring.span_choice import SpanChoice
from pretrainax.scoring.spans import documents_of_source, score_spans
from tests.support import chain
from tests.support.huggingface_weights import write_directory
from tests.support.runs import run

TEXTS = [
    "the cat sat on the mat and the dog ran to it. " * 3,
    "a long day in june, and we all went home by train. " * 3,
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text.strip())
    return {name: write_directory(folder / name, name) for name in ("bert", "gpt2")} | {
        "source": f"TextFiles(path='{folder}', valid_path='{folder}')"
    }


def evaluate(models, *flags):
    words = [f"--from={models['bert']}", f"--source={models['source']}", *flags]
    return run([sys.executable, "-m", "pretrainax.evaluate", *words])


@pytest.mark.slow
def test_two_models_pay_for_the_same_spans(models, tmp_path):
    flags = (
        "--bytes-of-spans",
        "--span-share=0.2",
        "--span-bytes=4",
        "--span-context=8",
        f"--compare-with={models['gpt2']}",
        f"--tasks=minimal_pairs:{tmp_path}/pairs.jsonl",
        f"--transcripts={tmp_path}/transcripts.jsonl",
    )
    pairs = [{"sentence_good": f"{x} is", "sentence_bad": f"{x} are", "UID": ""} for x in "abcdef"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    done = evaluate(models, *flags, f"--output={tmp_path}/out.json")
    assert done.returncode == 0, done.stderr
    bert, length, more, *tasks = json.loads((tmp_path / "out.json").read_text())
    assert [r["measure"] for r in tasks if r["part"].endswith(f"from {models['gpt2']}")] == ["accuracy_difference"]
    lines = [json.loads(line) for line in (tmp_path / "transcripts.jsonl").read_text().splitlines()]
    assert {line["model"] for line in lines if line["kind"] == "span"} == {str(models["bert"]), str(models["gpt2"])}
    assert len([line for line in lines if line["kind"] == "minimal_pairs"]) == 12
    choice = SpanChoice(share=0.2, mean_bytes=4, context=8)
    ours, theirs = (score_spans(load(models[name]), [t.strip() for t in TEXTS], choice)[0] for name in ("bert", "gpt2"))
    assert bert["value"] == pytest.approx(ours.bits_per_byte.value)
    assert length["measure"] == "span_bits_per_byte_for_length"
    assert more["value"] == pytest.approx(ours.bits_per_byte.value - theirs.bits_per_byte.value)
    assert more["measure"] == "span_bits_per_byte_difference" and str(models["gpt2"]) in more["part"]
    assert bert["counts"]["bytes"] == ours.bytes.sum() and ours.fingerprint in bert["how"]
    for shown in (f"{bert['value']:,.4f}", f"{more['value']:,.4f}", ours.fingerprint, "both sides", "the left side"):
        assert shown in done.stdout


class Flag(NamedTuple):
    value: Any = None
    present: bool = False


@pytest.mark.parametrize(
    "given, message",
    [
        ({"bytes-of-spans": True, "stride": 3}, "--stride changes nothing with --bytes-of-spans: leave it out"),
        ({"span-bytes": 3.0}, "--span-bytes changes nothing without --bytes-of-spans: leave it out"),
    ],
)
def test_a_flag_that_changes_nothing_is_refused(given, message):
    asked = collections.defaultdict(Flag, {name: Flag(value, True) for name, value in given.items()})
    asked["source"] = Flag("TextFiles(path='other')", True)
    with pytest.raises(UserError, match=re.escape(message)):
        Evaluation(asked)._check_flags()


def test_the_other_model_is_scored_once_for_all_checkpoints(monkeypatch):
    loaded, transcripts = [], []
    monkeypatch.setattr(text_scores, "find_origin", str)
    monkeypatch.setattr(text_scores, "_load", lambda name: loaded.append(name) or chain.knowing("encoder"))
    asked = {"compare-with": "runs/other", "bytes-of-spans": True, "source": "x"}
    reference = text_scores._Reference(asked, [], transcripts.append)
    first, second = (reference.span_scores("x", chain.texts(3, 60), SpanChoice(share=0.2)) for _ in range(2))
    assert first is second and loaded == ["runs/other"] and len(transcripts) == len(first[0].spans)
    assert (
        text_scores._Reference(asked | {"compare-with": None}, [], transcripts.append).span_scores("x", [], None) == []
    )


@pytest.mark.parametrize("flag", ["compare-with", "transcripts"])
def test_a_validation_has_no_transcripts_to_compare_or_write(flag):
    asked = collections.defaultdict(Flag, {flag: Flag("x", True)})
    with pytest.raises(UserError, match=f"--{flag} is for --source and --tasks"):
        Evaluation(asked)._check_flags()


def test_spans_without_a_text_to_take_them_from_are_refused():
    asked = collections.defaultdict(Flag, {"bytes-of-spans": Flag(True, True)})
    with pytest.raises(UserError, match="--bytes-of-spans is for --source"):
        Evaluation(asked)._check_flags()


def test_pairs_are_no_texts(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"text": "a b c", "target": "d"}\n')
    source = JsonLines(path=str(tmp_path / "pairs.jsonl"), target_field="target")
    with pytest.raises(UserError, match="has pairs of source and target, but spans need texts"):
        list(documents_of_source(source, split="all"))
