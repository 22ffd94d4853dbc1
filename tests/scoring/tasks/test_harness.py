"""Compares our model class for the lm-evaluation-harness with the harness' class for transformers, on its tasks."""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys

import pytest

from pretrainax.config import UserError
from pretrainax.data.sources import TextFiles
from pretrainax.inference.load import load
from pretrainax.interop.directories import export_workdir
from pretrainax.scoring.tasks.likelihoods import continuations
from tests.golden import CASES
from tests.support.docs_pages import how_to
from tests.support.huggingface_weights import write_directory, write_run, write_tokenizer
from tests.support.loaded import loaded_case

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'pretrainax[eval]'")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from pretrainax.scoring.tasks import harness  # noqa: E402
from pretrainax.scoring.tasks.harness import PretrainAX  # noqa: E402

pytestmark = pytest.mark.slow

ANIMALS = [
    {"q": "a cat", "choices": ["dog", "a hat"], "gold": 1},
    {"q": "an ox", "choices": ["sea", "ill", "mud"], "gold": 0},
    {"q": "we go", "choices": ["up", "to it"], "gold": 0},
    {"q": "", "choices": ["so", "no"], "gold": 1},
    {"q": "the sea is wide and we go ", "choices": ["on", "up"], "gold": 1},  # longer than the models' context
    {"q": "a cat</s>an", "choices": [" ox", "</s>"], "gold": 1},
    {"q": "<s>a cat", "choices": [" sat"], "gold": 0},
    {"q": "</s>a cat", "choices": [" sat"], "gold": 0},
]
TEXTS = [{"text": "the sea is wide and the sky is clear, so we go on."}, {"text": "a cat."}]
WRITTEN = [{"q": q, "a": "b"} for q in ("a", "the sea", "<s>the sea", "the end of the day a sea of", "a</s>b")]

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
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        source += "test_split: test\nfewshot_split: test\n"
        (folder / f"{name}.yaml").write_text(described + source)
    return folder


def manager(folder):
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(model, folder, tasks=tuple(TASKS), **settings):
    settings = {"bootstrap_iters": 0, "log_samples": True} | settings
    return lm_eval.simple_evaluate(model=model, tasks=[*tasks], task_manager=manager(folder), **settings)


def responses(found, task):
    """Returns the model's response to each request, in the order of the documents."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


FRAMES = {"gpt2": None, "t5_1_0": "$A </s>", "t5_1_1": "$A </s>", "bart": "<s> $A </s>", "t5gemma": "<s> $A"}


def write_model(directory, name: str):
    """Writes a model whose tokenizer puts <s> before a text, like LLaMA's, or has only </s>, like GPT-2's.

    "llama2 knows" has a <s> that it does not add, and "llama2 ends" also adds </s> to a text.
    """
    name, _, kind = name.partition(" ")
    write_directory(directory, name)
    return with_tokenizer(directory, {"knows": None, "ends": "<s> $A </s>"}.get(kind, FRAMES.get(name, "<s> $A")))


def with_tokenizer(directory, frame):
    """Adds a tokenizer that writes `frame` around a text, and the ids of its special tokens, to a model's directory."""
    write_tokenizer(directory, pad_id=98)  # with a token for each row of the embedding
    with edited(directory / "config.json") as model, edited(directory / "tokenizer_config.json") as config:
        ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 98}
        model |= ids
        if model["model_type"] == "gpt2":
            config["bos_token"], model["bos_token_id"] = "</s>", 1
        if model.get("is_encoder_decoder"):
            model["decoder_start_token_id"] = 98  # T5Gemma reads bos_token_id instead.
        for stack in ("encoder", "decoder"):
            if stack in model:  # T5Gemma
                model[stack] |= ids
    if frame is not None:
        with edited(directory / "tokenizer.json") as tokenizer:
            special = {piece: {"id": piece, "ids": [i], "tokens": [piece]} for i, piece in enumerate(("<s>", "</s>"))}
            text = {"Sequence": {"id": "A", "type_id": 0}}
            row = [text if x == "$A" else {"SpecialToken": {"id": x, "type_id": 0}} for x in frame.split()]
            template = {"single": row, "pair": [*row, text], "special_tokens": special}
            tokenizer["post_processor"] = {"type": "TemplateProcessing"} | template
    return directory


@contextlib.contextmanager
def edited(file):
    """Reads the JSON object of a file, and writes it after the changes."""
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


@pytest.fixture(
    scope="module",
    params=["gpt2", "llama2", "llama2 knows", "llama2 ends", "llama of transformers"]
    + ["t5_1_0", "t5_1_1", "bart", "t5gemma", "t5 of transformers", "t5 exported"],
)
def both(request, tmp_path_factory, tasks):
    """Returns the metrics of both classes, for the weights of one directory."""
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'pretrainax[parity]'")
    name = request.param
    directory = WRITERS.get(name, write_model)(tmp_path_factory.mktemp("hf") / "model", name)
    settings = {"no_repeat_ngram_size": 2, "eos_token_id": 1, "do_sample": True, "temperature": 0.5}
    limit = {}
    if "t5" in name or name == "bart":
        settings["decoder_start_token_id"] = 0 if name == "t5gemma" else 98
        limit = {"max_length": 14}  # Inputs have up to 51 tokens.
    (directory / "generation_config.json").write_text(json.dumps(settings))
    theirs = hf(directory, **limit)
    return evaluated(PretrainAX(load(directory), **limit), tasks), evaluated(theirs, tasks)


def hf(directory, **settings):
    """Makes the harness' class for transformers. It treats all inputs of a batch like the first, so the size is 1."""
    import transformers
    from lm_eval.models.huggingface import HFLM  # which imports torch

    theirs = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=1, **settings)
    if theirs.config.model_type == "t5":
        # The class calls `tie_weights`. In transformers 5, this overwrites the output matrix of T5 1.1, which is not
        # tied, with the embeddings.
        theirs._model = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    return theirs


def write_theirs(directory, name):
    """Writes a model that transformers initializes, with sizes that are not powers of two."""
    import torch
    import transformers

    torch.manual_seed(0)
    if name.startswith("t5"):
        sizes = {"d_model": 15, "d_kv": 5, "num_heads": 3, "d_ff": 21, "num_layers": 3, "num_decoder_layers": 2}
        config = transformers.T5Config(vocab_size=99, feed_forward_proj="gated-gelu", **sizes)
    else:
        sizes = {"hidden_size": 18, "intermediate_size": 21, "num_attention_heads": 3, "num_hidden_layers": 3}
        config = transformers.LlamaConfig(vocab_size=99, max_position_embeddings=20, **sizes)
    config.initializer_range = 0.5  # Otherwise all logits are nearly equal.
    model = transformers.AutoModelForSeq2SeqLM if name.startswith("t5") else transformers.AutoModelForCausalLM
    model.from_config(config).save_pretrained(directory)
    return with_tokenizer(directory, "$A </s>" if name.startswith("t5") else "<s> $A")


def write_export(directory, name):
    """Exports an encoder-decoder trained here; its config.json has another decoder start than `both` sets."""
    run = write_run(directory.parent / "run", CASES["t5_1_1"].config, pad_id=98)
    export_workdir(str(run), str(directory))
    (directory / "manifest.sha256").unlink()  # The test changes a file.
    return directory


WRITERS = {"t5 exported": write_export, **dict.fromkeys(("t5 of transformers", "llama of transformers"), write_theirs)}


def assert_equal_choices(ours, theirs):
    said, expected = (responses(found, "animals") for found in (ours, theirs))
    for of_document, by_them in zip(said, expected, strict=True):
        assert [best for _, best in of_document] == [best for _, best in by_them]
        assert [nats for nats, _ in of_document] == pytest.approx([nats for nats, _ in by_them], abs=1e-4)


def test_choices_get_the_figures_of_the_harness(both):
    ours, theirs = both
    assert_equal_choices(ours, theirs)
    for name in ("acc,none", "acc_norm,none", "acc_bytes,none"):
        assert ours["results"]["animals"][name] == theirs["results"]["animals"][name]


def test_texts_get_the_perplexity_of_the_harness(both):
    """One document is longer than the 20 tokens that the model reads."""
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
    assert said != pytest.approx(continuations(loaded, [pair])[0].log_likelihood, abs=1e-2)  # after <s>


def test_a_prompt_that_leaves_no_room_is_cut_and_said(caplog):
    model = PretrainAX(loaded_case("gpt2"))
    options = {"until": [], "max_gen_toks": 11}  # The context has 20 tokens; `hf` also cuts <s>.
    model.generate_until(requests("generate_until", ("the end of the day a sea of", options)))
    assert "a prompt of 28 tokens was cut from the left to 9" in caplog.text


def test_the_end_of_an_answer_is_a_stop_string_of_a_model_that_learned_to_write_answers(monkeypatch):
    model = PretrainAX(loaded_case("gpt2"))
    asked = requests("generate_until", ("a", {"until": [], "max_gen_toks": 8}))
    (text,) = model.generate_until(asked)
    monkeypatch.setattr(harness, "ends_of_answers", lambda loaded: (text[-1],))
    assert model.generate_until(asked) == [text[: text.index(text[-1])]]


def test_a_task_may_ask_for_one_beam():
    """The tasks of NorEval do this; the beam in the model's generation_config.json does not apply then."""
    model, options = PretrainAX(loaded_case("gpt2")), {"until": [], "max_gen_toks": 4}
    texts = [model.generate_until(requests("generate_until", ("a", options | more))) for more in ({}, {"num_beams": 1})]
    assert texts[0] == texts[1]
    assert harness._given({"until": [], "num_beams": 1}, ())["num_beams"] == 1


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
    with pytest.raises(UserError, match="bert_masked_lm is of the family encoder, but the harness needs a decoder or"):
        PretrainAX(loaded_case("bert_masked_lm"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'pretrainax[parity]'")
    directory = write_model(tmp_path_factory.mktemp("hf") / "model", "llama2")
    return directory, load(directory), hf(directory)


CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ {'system': '[CLS]', 'user': '[SEP]'}.get(m.role, '') + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{{ ' a' if add_generation_prompt else '' }}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHAT


@pytest.mark.parametrize(
    "template, settings",
    [
        (CHAT, {"system_instruction": "be kind", "fewshot_as_multiturn": True}),
        (CHAT, {"fewshot_as_multiturn": False}),
        (
            [{"name": "default", "template": NO_SYSTEM}, {"name": "x", "template": ""}],
            {"system_instruction": "be kind"},
        ),
    ],
)
def test_chats_get_the_figures_of_the_harness(template, settings, llama, tasks):
    import transformers

    directory, loaded, theirs = llama
    with edited(directory / "tokenizer_config.json") as config:
        config["chat_template"] = template
    theirs.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    settings = {"apply_chat_template": True, "num_fewshot": 1} | settings
    found = [evaluated(model, tasks, ["animals", "written"], **settings) for model in (PretrainAX(loaded), theirs)]
    ours, expected = ([x["arguments"] for task in run["samples"].values() for x in task] for run in found)
    assert ours == expected
    assert responses(found[0], "written") == responses(found[1], "written")
    assert_equal_choices(*found)


# --- the command


def test_the_harness_finds_the_model_by_name(llama, tasks):
    arguments = f"path={llama[0]},max_length=20,dtype=float32,batch_size=2"
    model = PretrainAX.create_from_arg_string(arguments, {"batch_size": 1, "max_batch_size": None, "device": "cpu"})
    assert (model.max_length, model.batch_size) == (20, 2)
    found = lm_eval.simple_evaluate(
        model="pretrainax", model_args=arguments, tasks=["texts"], task_manager=manager(tasks), bootstrap_iters=0
    )
    expected = evaluated(PretrainAX(llama[1]), tasks, ["texts"])
    assert found["results"]["texts"] == expected["results"]["texts"]


def test_a_step_of_a_run_is_an_argument(tmp_path):
    write_run(tmp_path / "run", CASES["gpt2"].config, pad_id=98)
    (step,) = (folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir())
    model = PretrainAX.create_from_arg_obj({"path": str(tmp_path / "run"), "step": int(step)})
    assert f"step {step}" in model.loaded.origin


@pytest.mark.parametrize(
    "given, flags, size", [({}, {}, 16), ({}, {"batch_size": "8"}, 8), ({}, {"batch_size": "auto:2"}, 16)]
)
def test_a_batch_size_of_the_command_counts(given, flags, size, llama):
    given |= {"path": str(llama[0]), "trust_remote_code": True}
    assert PretrainAX.create_from_arg_obj(given, flags).batch_size == size


def test_a_device_that_jax_does_not_use_is_said(llama, caplog):
    PretrainAX.create_from_arg_obj({"path": str(llama[0])}, {"device": "cuda:0"})
    assert "--device=cuda has no effect: JAX uses cpu, see JAX_PLATFORMS" in caplog.text


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("pretrained=x", r"--model_args has pretrained=x, .*path"),
        ("", "--model_args has no path: set --model_args path=DIR"),
        ("path=x,dtype=int8", "x"),
        ("path={},batch_size=0", "batch_size is 0, it must be a whole number from 1"),
        ("path={},max_length=99", "max_length is 99, it must be a whole number from 1 to 20"),
    ],
)
def test_an_argument_that_cannot_be_is_one_line(arguments, message, llama):
    with pytest.raises(UserError, match=message):
        PretrainAX.create_from_arg_string(arguments.format(llama[0]))


def command(*flags):
    module = [sys.executable, "-m", "pretrainax.scoring.tasks.harness", "--model", "pretrainax"]
    return subprocess.run([*module, *flags], capture_output=True, text=True)


def test_the_command_evaluates_a_directory(llama, tasks, tmp_path):
    flags = "--device cpu --batch_size 4 --trust_remote_code --tasks texts --include_path".split()
    done = command("--model_args", f"path={llama[0]}", *flags, str(tasks), "--output_path", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "bits_per_byte" in done.stdout
    (results,) = tmp_path.rglob("results*.json")
    assert json.loads(results.read_text())["config"]["model"] == "pretrainax"


def test_a_mistake_in_the_command_is_one_line(tasks):
    done = command("--model_args", "pth=x", "--tasks", "texts", "--include_path", str(tasks))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("pretrainax: --model_args has pth=x, ")
