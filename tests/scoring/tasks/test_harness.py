"""Holds our class for the lm-evaluation-harness against its own for transformers, on tasks of its own kind."""

import contextlib
import dataclasses
import json
import re

import pytest

from pretrainax.config import UserError
from pretrainax.data.sources import TextFiles
from pretrainax.inference.load import load
from pretrainax.scoring.tasks.likelihoods import continuations
from tests.support.docs_pages import how_to
from tests.support.huggingface_weights import write_directory, write_tokenizer
from tests.support.loaded import loaded_case

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'pretrainax[eval]'")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from pretrainax.scoring.tasks.harness import PretrainAX  # noqa: E402

pytestmark = pytest.mark.slow

ANIMALS = [
    {"q": "a cat", "choices": ["dog", "a hat"], "gold": 1},
    {"q": "an ox", "choices": ["sea", "ill", "mud"], "gold": 0},
    {"q": "we go", "choices": ["up", "to it"], "gold": 0},
    {"q": "", "choices": ["so", "no"], "gold": 1},
]
TEXTS = [{"text": "the sea is wide and the sky is clear, so we go on."}, {"text": "a cat."}]
WRITTEN = [{"q": "a", "a": "b"}, {"q": "the sea", "a": "c"}]

CHOICE = """
task: animals
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: gold
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
"""
ROLLING = """
task: texts
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
GENERATE = """
task: written
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n", "zz"], do_sample: false, max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""
TASKS = {"animals": (CHOICE, ANIMALS), "texts": (ROLLING, TEXTS), "written": (GENERATE, WRITTEN)}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, (described, documents) in TASKS.items():
        data = folder / f"{name}.json"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(described + source)
    return folder


def evaluated(model, folder):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )


def responses(found, task):
    """What the model said to each request, in the order of the documents."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def write_model(directory, name: str):
    """A directory whose tokenizer puts <s> before a text, as LLaMA's, or knows </s> alone, as GPT-2's.

    "llama2 knows" has a <s> that it does not add, and "llama2 ends" adds </s> to a text, too.
    """
    name, _, kind = name.partition(" ")
    write_directory(directory, name)
    write_tokenizer(directory, pad_id=98)  # with a piece for each row of the embedding
    with edited(directory / "config.json") as model, edited(directory / "tokenizer_config.json") as config:
        model |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 98}
        if name == "gpt2":
            config["bos_token"], model["bos_token_id"] = "</s>", 1
    if name != "gpt2" and kind != "knows":
        with edited(directory / "tokenizer.json") as tokenizer:
            begin, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
            end = [{"SpecialToken": {"id": "</s>", "type_id": 0}}] if kind == "ends" else []
            special = {piece: {"id": piece, "ids": [i], "tokens": [piece]} for i, piece in enumerate(("<s>", "</s>"))}
            template = {"single": [begin, text, *end], "pair": [begin, text, text], "special_tokens": special}
            tokenizer["post_processor"] = {"type": "TemplateProcessing"} | template
    return directory


@contextlib.contextmanager
def edited(file):
    """Reads and writes the object of a file."""
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


@pytest.fixture(scope="module", params=["gpt2", "llama2", "llama2 knows", "llama2 ends"])
def both(request, tmp_path_factory, tasks):
    """The figures of both classes, for the weights of one directory."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'pretrainax[parity]'")
    from lm_eval.models.huggingface import HFLM  # which imports these

    directory = write_model(tmp_path_factory.mktemp("hf") / "model", request.param)
    settings = {"no_repeat_ngram_size": 2, "eos_token_id": 1, "do_sample": True, "temperature": 0.5}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    theirs = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=2)
    return evaluated(PretrainAX(load(directory)), tasks), evaluated(theirs, tasks)


def test_choices_get_the_figures_of_the_harness(both):
    ours, theirs = both
    said, expected = (responses(found, "animals") for found in both)
    for of_document, by_them in zip(said, expected, strict=True):
        assert [best for _, best in of_document] == [best for _, best in by_them]
        assert [nats for nats, _ in of_document] == pytest.approx([nats for nats, _ in by_them], abs=1e-4)
    for name in ("acc,none", "acc_norm,none", "acc_bytes,none"):
        assert ours["results"]["animals"][name] == theirs["results"]["animals"][name]


def test_texts_get_the_perplexity_of_the_harness(both):
    """Of which one is longer than the 20 tokens that the model reads."""
    ours, theirs = (found["results"]["texts"] for found in both)
    for name in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


def test_texts_go_on_as_in_the_harness(both):
    assert responses(both[0], "written") == responses(both[1], "written")
    assert all(said != "" for (said,) in responses(both[0], "written"))


@pytest.mark.slow
def test_the_page_says_how(tasks, capsys):
    (block,) = re.findall(r"```py\n(.*?)```", how_to("tasks"), re.DOTALL)
    exec(compile(block.replace("my/tasks", str(tasks)), "docs/how-to/tasks.md", "exec"), {"model": loaded_case("gpt2")})
    assert "'acc_bytes,none': " in capsys.readouterr().out


def requests(kind, *arguments):
    return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]


def test_what_was_trained_here_has_the_separator_before_its_texts():
    loaded = loaded_case("gpt2")
    data = dataclasses.replace(loaded.experiment.data, source=TextFiles(path="x"))
    trained = dataclasses.replace(loaded, experiment=dataclasses.replace(loaded.experiment, data=data))
    pair = ("a cat", " sat")
    ((said, _),) = PretrainAX(trained).loglikelihood(requests("loglikelihood", pair), disable_tqdm=True)
    assert said == pytest.approx(continuations(trained, [pair])[0].log_likelihood, abs=1e-4)
    assert said != pytest.approx(continuations(loaded, [pair])[0].log_likelihood, abs=1e-2)  # behind <s>


def test_a_prompt_that_leaves_no_room_is_cut_and_said(caplog):
    model = PretrainAX(loaded_case("gpt2"))
    short, long = "a sea of", "the end of the day a sea of"
    options = {"until": [], "max_gen_toks": 11}  # of 20 tokens, after <s> and the 8 letters of `short`
    said = model.generate_until(requests("generate_until", (short, options), (long, options)))
    assert said[0] == said[1] and "a prompt of 27 tokens was cut from the left to 8" in caplog.text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"until": [], "num_beams": 2}, "generation_kwargs has num_beams=2, allowed: min_p, repetition_penalty"),
        ({"until": []}, "max_gen_toks is 256, but the model reads 20 tokens: reduce it"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(options, message):
    with pytest.raises(UserError, match=message):
        PretrainAX(loaded_case("gpt2")).generate_until(requests("generate_until", ("a", options)))


def test_an_encoder_is_refused():
    with pytest.raises(UserError, match="bert_masked_lm is of the family encoder, but the harness needs a decoder"):
        PretrainAX(loaded_case("bert_masked_lm"))
