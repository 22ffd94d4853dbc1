"""Tests that the state of the loop is restored from run.json, also from an older version's run.json."""

import json

from pretrainax.training.loop_state import Counts, LoopState, Rollback

FRESH = LoopState(tokenizer="t", corpora=["a", "b"])


def test_run_json_has_the_keys_that_it_always_had_in_their_order():
    expected = {
        "step": 0,
        "tokenizer": "t",
        "corpora": ["a", "b"],
        "skipped_updates": 0,
        "best_loss": None,
        "evaluations_since_best": 0,
        "rollbacks": [],
        "recent": [],
        "select_by": "loss",
        "counts": {"text_tokens": 0, "text_bytes": 0, "tokens": 0, "flops": 0.0},
        "sums": {},
        "metrics_file": None,
        "is_scheduled": True,
        "valid_batches": None,
    }
    assert json.dumps(FRESH.to_json()) == json.dumps(expected)


def test_a_rollback_is_an_object_of_three_numbers():
    state = LoopState(tokenizer="t", corpora=[], rollbacks=[Rollback(spike=13, step=9, skipped=6)])
    assert state.to_json()["rollbacks"] == [{"spike": 13, "step": 9, "skipped": 6}]


def test_what_is_written_comes_back():
    state = LoopState(
        step=7,
        tokenizer="t",
        corpora=["a"],
        skipped_updates=2,
        best_loss=1.5,
        evaluations_since_best=3,
        rollbacks=[Rollback(spike=13, step=9, skipped=6)],
        recent=[[1.0, 0.5]],
        counts=Counts(text_tokens=3, text_bytes=10, tokens=4, flops=0.1),
        sums={"loss": [1.0 / 3, 4.0]},
    )
    assert LoopState.from_json(json.loads(json.dumps(state.to_json())), FRESH) == state


def test_a_field_that_an_older_checkpoint_lacks_is_as_in_a_fresh_run():
    assert LoopState.from_json({"skipped_updates": 7, "tokenizer": "u"}, FRESH) == LoopState(
        skipped_updates=7, tokenizer="u", corpora=["a", "b"]
    )


def test_what_the_steps_of_an_older_version_have_taken_stays_unknown():
    older = LoopState.from_json({"step": 7, "tokenizer": "u"}, FRESH)
    assert older.counts is None and LoopState.from_json(older.to_json(), FRESH).counts is None


def test_a_field_that_only_a_newer_version_knows_is_left_out():
    assert LoopState.from_json(FRESH.to_json() | {"phase": 2}, FRESH) == FRESH


def test_what_a_checkpoint_carries_does_not_change_with_the_loop():
    state = LoopState(tokenizer="t", corpora=[], recent=[[1.0, 0.5]])
    saved = state.to_json()
    state.recent.append([2.0, 0.5])
    assert saved["recent"] == [[1.0, 0.5]]
