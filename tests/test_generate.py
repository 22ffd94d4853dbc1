"""`python -m pretrainax.generate` continues the prompts of its command line or of a file."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

import pretrainax
from pretrainax.config import UserError
from pretrainax.generate import Generation
from pretrainax.inference.decoding import Generated, Rates
from pretrainax.inference.prompt_files import Outputs, read_prompts
from pretrainax.inference.request import Sampling
from tests.support.huggingface_weights import write_directory
from tests.support.runs import run

PROMPTS = ["a cat", {"prompt": "the dog.", "more": 1}, "no", "x, y", "z"]


def generate(*words):
    return run([sys.executable, "-m", "pretrainax.generate", *words])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_directory(tmp_path_factory.mktemp("generate") / "gpt2", "gpt2")


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.slow
def test_a_prompt_goes_on_and_the_rates_are_told(model):
    out = generate(f"--from={model}", "the cat", "--max_new_tokens=6", "--log_probs")
    assert out.returncode == 0, out.stderr
    text, *tokens = out.stdout.rstrip("\n").split("\n")
    assert text.startswith("the cat") and len(text) > len("the cat") and len(tokens) == 6
    written = "".join(token.split("'")[1] for token in tokens)
    assert text == f"the cat{written}" and all(float(token.split()[0]) < 0 for token in tokens)
    assert "prefill: 8 tokens in" in out.stderr and "steps: 5 tokens in" in out.stderr and "ms per step" in out.stderr


def test_a_prompt_without_a_continuation_is_printed(model, capsys):
    loaded, flags = (
        pretrainax.load(model),
        {"log_probs": SimpleNamespace(value=False), "batch_size": SimpleNamespace(value=1)},
    )
    Generation(flags, {})._show(loaded, Sampling(allowed_tokens=loaded.end_tokens), ["a cat"], Rates())
    assert capsys.readouterr().out == "a cat\n"


@pytest.mark.slow
def test_a_file_that_was_cut_short_is_gone_on_with(model, tmp_path):
    source = write(tmp_path / "prompts.jsonl", map(json.dumps, PROMPTS))
    flags = [f"--from={model}", f"--input={source}", "--temperature=0.9", "--max_new_tokens=5", "--batch_size=2"]
    done = generate(*flags, f"--output={tmp_path}/texts.jsonl")
    assert done.returncode == 0, done.stderr
    whole = (tmp_path / "texts.jsonl").read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["prompt"] for line in lines] == ["a cat", "the dog.", "no", "x, y", "z"]
    assert all(len(line["texts"]) == 1 and line["texts"][0].keys() == {"text", "ended"} for line in lines)
    # The process was killed while it wrote line 3.
    (tmp_path / "texts.jsonl").write_bytes(whole[: whole.index(b"\n", whole.index(b"\n") + 1) + 9])
    again = generate(*flags, f"--output={tmp_path}/texts.jsonl")
    assert again.returncode == 0 and "2 of 5 prompts are done" in again.stderr
    assert (tmp_path / "texts.jsonl").read_bytes() == whole


@pytest.mark.slow
def test_the_settings_of_the_model_are_the_defaults_of_the_flags(tmp_path):
    directory = write_directory(tmp_path / "gpt2", "gpt2")
    settings = {"do_sample": True, "temperature": 5.0, "max_new_tokens": 7, "chat_format": "a", "eos_token_id": 2}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    own = generate(f"--from={directory}", "the cat")
    from_file = "from generation_config.json: max_new_tokens 7, temperature 5.0, top_k 50 (default of transformers)"
    assert own.returncode == 0 and from_file in own.stderr, own.stderr
    assert "unknown in generation_config.json, without effect: chat_format" in own.stderr
    plain = generate(f"--from={directory}", "the cat", "--ignore=all", "--max_new_tokens=7")
    assert plain.stdout != own.stdout and "generation_config.json" not in plain.stderr
    greedy = generate(f"--from={directory}", "the cat", "--temperature=0")
    assert greedy.stdout == plain.stdout and "from generation_config.json: max_new_tokens 7\n" in greedy.stderr
    beams = generate(
        *(f"--from={directory}", "the cat", "--num_beams=2", "--early_stopping=never", "--renormalize_logits"),
        *("--forced_eos_token_id=2", "--stop=zz"),
    )
    assert beams.returncode == 0, beams.stderr
    wrong = generate(f"--from={directory}", "the cat", "--ignore=top_q")
    assert wrong.returncode == 2 and "ignore has 'top_q'" in wrong.stderr and "Traceback" not in wrong.stderr


@pytest.mark.slow
def test_holes_are_filled_in_with_their_candidates(tmp_path):
    bert = write_directory(tmp_path / "bert", "bert_masked_lm")
    out = generate(f"--from={bert}", "--fill=2", "the [MASK]at, a[MASK]")
    assert out.returncode == 0, out.stderr
    text, *candidates = out.stdout.splitlines()
    assert re.fullmatch("the .at, a.", text)
    assert [re.fullmatch(r"  hole (\d)  0\.\d{4}  '.+'", line)[1] for line in candidates] == ["1", "1", "2", "2"]
    wrong = generate(f"--from={bert}", "--fill=2", "--temperature=0.5", "the [MASK]at")
    assert wrong.returncode == 2 and "--temperature is not for --fill, which takes --from" in wrong.stderr


def text_of(number):
    return Generated(number, "text\x1b", (5, 2), (-1.0, -0.5), "eos")


def test_a_file_of_an_earlier_version_is_gone_on_with(tmp_path):
    path, settings = str(tmp_path / "out.jsonl"), {"temperature": 0.0, "stop": ()}
    Outputs(path, settings, ["one", "two"]).add(["one"], [text_of(0)], log_probs=True)
    assert Outputs(path, settings | {"early_stopping": None, "banned_sequences": ()}, ["one", "two"]).done == 1
    with pytest.raises(UserError, match="was written with num_beams None, now num_beams is 4"):
        Outputs(path, settings | {"num_beams": 4}, ["one", "two"])
    with pytest.raises(UserError, match="was written with forced_bos_token_id None, now forced_bos_token_id is 0"):
        Outputs(path, settings | {"forced_bos_token_id": 0}, ["one", "two"])  # the <s> of BART


def test_what_is_there_is_compared_before_more_is_written(tmp_path):
    path, settings = str(tmp_path / "out.jsonl"), {"from": "runs/a, step 5", "temperature": 0.5, "stop": ("a",)}
    Outputs(path, settings, ["one", "two"]).add(["one"], [text_of(0)], log_probs=True)
    again = Outputs(path, settings, ["one", "two"])
    assert again.done == 1
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["texts"] == [{"text": "text\x1b", "ids": [5, 2], "log_probs": [-1.0, -0.5], "ended": "eos"}]
    with pytest.raises(UserError, match="was written with temperature 0.5, now temperature is 0.7: set another"):
        Outputs(path, settings | {"temperature": 0.7}, ["one", "two"])
    with pytest.raises(UserError, match="out.jsonl, line 1 has another prompt than prompt 1 of the input"):
        Outputs(path, settings, ["1", "two"])
    with pytest.raises(UserError, match="line 1 has another prompt"):
        Outputs(path, settings, [])
    (tmp_path / "out.jsonl.settings.json").unlink()
    with pytest.raises(UserError, match="out.jsonl exists without its settings in"):
        Outputs(path, settings, ["one", "two"])


def test_blank_lines_are_no_prompts(tmp_path):
    assert read_prompts(str(write(tmp_path / "prompts.jsonl", ['"a"', "", '{"prompt": "b"}', " \t", ""]))) == ["a", "b"]


@pytest.mark.parametrize(
    "lines, message",
    [
        (['"a"', "", "a"], "line 3 is no JSON"),
        (['"a"', "a"], 'line 2 is no JSON .*: write "a prompt" or'),
        (['"a"', '{"text": "b"}'], "line 2 has no prompt: write"),
        (["[1]"], "line 1 has no prompt: write"),
        (["[" * 100_000], "line 1 is no JSON"),
        (['"a"', '{"prompt": "\\ud800 a"}'], "prompts.jsonl, line 2: .* surrogates not allowed"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(lines, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_prompts(str(write(tmp_path / "prompts.jsonl", lines)))
