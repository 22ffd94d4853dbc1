"""Runs commands with the input of beginners and attackers: `python -m tests.fuzz.mistakes [--only=WORD]`.

Each command line in the table must exit with status 2, print one line with the expected words, and leave nothing in its
working directory. Each runs in a fork of a process that has imported the modules of the commands.
"""

import argparse
import itertools
import os
import pathlib
import runpy
import sys
import tempfile
import time
from typing import NamedTuple

from tests.fuzz.forked import run_forked

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 60  # timeout of one command
TINY = f"--config={ROOT}/tests/support/tiny.py:gpt"
T5 = f"--config={ROOT}/tests/support/tiny.py:t5"
HUGE = ("9" * 19, "9" * 400, "9" * 5000, "1e400", "-" + "9" * 19)
DEEP = ("-" * 5000 + "1", "(" * 5000, "[" * 90_000 + "]" * 90_000, "not " * 9000 + "1", "A(b=" * 2000 + ")" * 2000)
NOT_UTF8 = os.fsdecode(b"caf\xe9")
NO_PATHS = {"gs://": "names no bucket"}  # invalid paths, with the expected words
NO_PATHS |= dict.fromkeys(("ftp://bucket/a", "hdfs://host/a", "file:///a", "abfs+x://a"), "not a supported store")


class Mistake(NamedTuple):
    command: str  # pretrainax.NAME
    words: tuple[str, ...]
    said: str  # expected words of the line


def mistakes(folder: pathlib.Path) -> list[Mistake]:
    """Returns the table, and writes its files to `folder`."""
    return [
        *(
            Mistake(command, tuple(words), said)
            for command, words, said in (*_of_names(), *_of_other_commands(), *_of_recipes(), *_of_predictions())
        ),
        *(Mistake("main", (TINY, f"--config.data.source.path={folder}", *words), said) for words, said in _of_grids()),
        *(Mistake("main", (TINY, f"--config.tuning={tuning}"), said) for tuning, said in _of_tunings()),
        *(Mistake("main", (TINY, f"--config.checkpoint.adapt={kinds}"), said) for kinds, said in _of_adaptations()),
        *(Mistake("main", (TINY, f"--config.{field}={value}"), said) for field, value, said in _of_values()),
        *(Mistake(command, tuple(words), said) for command, words, said in _of_paths()),
        *(Mistake("main", (f"--config={given}",), said) for given, said in _of_config_files(folder)),
    ]


def _of_names():
    """Fields and flags with wrong names."""
    steps = "--config.train.steps"
    return [
        ("main", ["--train.steps=5"], f"{steps}=5"),
        ("main", [TINY, "--train.steps=5"], f"{steps}=5"),
        ("main", [TINY, "--train.steps", "5"], f"{steps}=…"),
        ("main", [TINY, "--steps=5"], f"{steps}=5"),
        ("main", [TINY, "-steps=5"], f"{steps}=5"),
        ("main", [TINY, "train.steps=5"], f"{steps}=5"),
        ("main", [TINY, "steps=5"], f"{steps}=5"),
        ("main", [TINY, "--config.steps=5"], f"did you mean {steps}?"),
        ("main", [TINY, "--config.train.stpes=5"], "did you mean 'steps'"),
        ("main", [TINY, "--config.data.learning_rate=1"], "did you mean --config.optimizer.learning_rate?"),
        ("main", [TINY, "--config.train.steps.x=5"], "config.train.steps has no field 'x'"),
        ("main", [TINY, "--config.=5"], "config has no field ''"),
        ("main", [TINY, "--config.train..steps=5"], "config.train has no field ''"),
        ("main", [TINY, "--config.data.source[0]=5"], "config.data.source[0]: the field has no items"),
        ("main", [TINY, "--config.model.generator.d_model=5"], "config.model.generator is None; set it first"),
        ("main", [TINY, "--noconfig.model.usebias"], "did you mean 'use_bias'"),
        ("main", [TINY, steps], "needs a value"),
        ("main", [steps + "=5"], "--config is missing"),
        ("main", [TINY, "--wrkdir=x"], "did you mean 'workdir'"),
        ("main", [TINY, "--wokers", "3"], "unknown flag --wokers"),
        ("main", [TINY, "runs/one"], "unexpected argument 'runs/one'"),
        ("main", [], "--config is missing"),
        ("plan", [TINY, "--topolgy=v5e:4"], "did you mean 'topology'"),
        ("prepare", ["--data.source=x"], "--config.data.source=x"),
        ("huggingface", ["imprt"], "import or export or verify"),
        ("huggingface", ["export", "--workdir=configs@best", "--step=3", "--to=x"], "both select a checkpoint"),
        ("evaluate", [], "--from is missing"),
        ("evaluate", ["--form=x"], "unknown flag --form, did you mean 'from'?"),
        ("evaluate", ["--from=x", "--workdir=x"], "leave one of them out"),
        ("evaluate", ["--from=no/such"], "no/such"),
        ("evaluate", ["--from=configs"], "is neither a run"),
        ("evaluate", ["--from=x", "--split=test"], "--split"),
        ("evaluate", ["--from=x", "--stride=many"], "--stride"),
        ("evaluate", ["--from=x", "--documents=0"], "--documents"),
        ("evaluate", ["--from=x", "--span-bytes=long"], "--span-bytes"),
        ("evaluate", ["--from=x", "--examples=many"], "--examples"),
        ("generate", ["a"], "--from is missing"),
        ("generate", ["--from=x"], 'give either prompts, such as "Once upon a time"'),
        ("generate", ["--from=x", "a", "--input=x"], "or a file of prompts, --input=prompts.jsonl"),
        ("generate", ["--from=x", "--input=x"], "--input=prompts.jsonl and --output=texts.jsonl need each other"),
        ("generate", ["--from=x", "a", "--temprature=1"], "did you mean 'temperature'?"),
        ("generate", ["--from=x", "a", "--temperature=-1"], "temperature is -1.0, it must be 0"),
        ("generate", ["--from=x", "a", "--temperature=hot"], "--temperature=hot"),
        ("generate", ["--from=x", "a", "--top_p=2", "--temperature=1"], "top_p is 2.0, it must be above 0"),
        ("generate", ["--from=x", "a", "--top_k=3"], "top_k is 3 and temperature 0, which is greedy"),
        ("generate", ["--from=x", "a", "--seed=-1"], "seed is -1, it must be a whole number from 0"),
        ("generate", ["--from=x", "a", "--stop="], "stop is ('',), it must be a tuple of strings that are not empty"),
        ("generate", [TINY, "a"], "--config is not for this command"),
        ("generate", ["--workdir=x", "a"], "--workdir is not for this command"),
        ("generate", ["--from=no/such/run", "a"], "no/such/run"),
        ("evaluate", ["--bytes-of-spans=x"], "flag --bytes-of-spans=x: it must be true or false"),
    ]


def _of_other_commands():
    """Flags that another command, subcommand or mode reads."""
    return [
        ("huggingface", ["import", "--from=x", "--push=me/x"], "--push is for export: leave it out"),
        ("huggingface", ["import", "--from=x", "--config=gpt2"], "--config is for export: leave it out"),
        ("huggingface", ["import", "--from=x", "--dtype=bfloat16"], "--dtype is for export: leave it out"),
        ("huggingface", ["export", "--to=x", "--base=y"], "--base is for import and verify: leave it out"),
        ("huggingface", ["verify", "--from=x", "--noverify"], "--verify is for import and export: leave it out"),
        ("tokenizer", ["encode", "--tokenizer=x", "--to=y"], "--to is for train and report: leave it out"),
        ("tokenizer", ["train", TINY, "--sizes=100"], "--sizes is for report: leave it out"),
        ("inspect", [TINY, "--picture=x.png"], "--picture has no effect without --widths"),
        ("inspect", [TINY, "--widths=32,64", "--html=x.html"], "--html has no effect with --widths"),
        ("zoo", ["--config=gpt2"], "--config is not for this command: leave it out"),
        ("report", ["--workdir=x"], "--workdir is not for this command: leave it out"),
        ("verify_resume", [TINY, "--workdir=x"], "--workdir is for --record; without it, the runs are in a temporary"),
        ("inspect", [TINY, "--workdir=x"], "--workdir is not for this command: leave it out"),
        ("study", ["x.toml", "--workdir=x", "--config.train.steps=5"], "so --config.train.steps cannot set a field"),
    ]


def _of_grids():
    """Flags for several runs that give none or too many."""
    return [
        (["--seeds=0"], "--seeds"),
        (["--seeds=many"], "--seeds"),
        (["--seeds=2", "--sweep=train.seed=1,2"], "conflicts with --seeds"),
        (["--sweeps=train.steps=1,2"], "did you mean 'sweep'"),
        (["--sweep=train.steps"], "give a field and its values"),
        (["--sweep=steps=1,2"], "did you mean --config.train.steps"),
        (["--sweep=train.steps=1,0"], "steps=0: config.train.steps is 0, it must be at least 1"),
        *((["--sweep", f"model.layer_pattern={value}"], "--sweep=model.layer_pattern=") for value in DEEP),
        *((["--sweep", f"train.steps=1,{value}"], "train.steps") for value in HUGE),
        *(([f"--seeds={value}"], "--seeds") for value in HUGE),
    ]


def _of_tunings():
    return [
        ("Lora", "unknown Tuning 'Lora'"),
        ("LoRA(ranks=2)", "LoRA has no field 'ranks', did you mean 'rank'"),
        ("LoRA()", "set config.checkpoint.init_from to"),
        ("LoRA(targets=('qery',))", "did you mean 'query'"),
        ("LoRA(rank=99)", "it must be at most 32"),
    ]


def _of_adaptations():
    return [
        ("DecoderToEncode()", "did you mean 'DecoderToEncoder'"),
        ("Layers(layers='evenl')", "it must be a tuple, each of type int or 'evenly' or 'stacked'"),
        ("Layers()", "which gives config.checkpoint.init_from another shape: set it to"),
    ]


def _of_recipes():
    """Flags of the sources of a config's values."""
    return [
        ("recipe", [], "--config is missing"),
        ("recipe", [TINY], "--config=tiny-gpt has no ledger"),
        ("recipe", ["--config=gpt2", "--only=optimiser"], "no field starts with this"),
        ("recipe", ["--preset=bert_bse"], "did you mean 'bert_base'"),
        ("recipe", ["--config=gpt2", "--copies=configs"], "has no effect without --check"),
        ("recipe", ["--config=gpt2", "--check", "--copies=no/such"], "--copies=no/such is not a folder"),
        ("recipe", ["--preset=bert_base", "--config=bert_base"], "leave one of them out"),
    ]


def _of_predictions():
    """Flags of predictions with a fine-tuned model."""
    return [
        ("predict", [], "--from is missing"),
        ("predict", ["--from=no/such/run"], "no/such/run"),
        ("predict", ["--from=x", "--batch=0"], "--batch"),
        ("predict", ["--from=x", "--format=xml"], "--format"),
        ("predict", ["--from=x", "--inptu=y"], "did you mean 'input'"),
        ("predict", [TINY, "--from=x"], "--config=FILE is not for this command"),
        ("predict", ["--workdir=x"], "--workdir is not for this command"),
    ]


def _of_values():
    """Config fields, invalid values, and expected words."""
    return [
        *(("train.steps", value, "config.train.steps") for value in (*HUGE, *DEEP)),
        *(("train.seed", value, "config.train.seed") for value in HUGE),
        *(("model.vocab_size", value, "config.model.vocab_size") for value in HUGE),
        *((field, value, field) for field in ("optimizer", "data.source", "model.layer_pattern") for value in DEEP),
        *(("optimizer.learning_rate", value, "learning_rate") for value in ("nan", "inf", "-inf", "1e999", "fast")),
        ("train.steps", "many", "it must be of type int"),
        ("train.steps", "1.5", "it must be of type int"),
        ("train.steps", "1e-3", "it must be of type int"),
        ("train.steps", "none", "it must be of type int"),
        ("train.steps", "", "it must be of type int"),
        ("train.steps", "0x", "it must be of type int"),
        ("data.drop_duplicates", "maybe", "it must be of type bool"),
        ("data.drop_duplicates", "2", "it must be of type bool"),
        ("evaluate.patience", "soon", "it must be of type int or None"),
        ("model", "t5_small", "--config=t5_base"),
        ("model", "gpt2", "--config=gpt2"),
        ("model", "none", "config.model is a config section"),
        ("train", "fast", "config.train is a config section"),
        ("train.remat", "all", "allowed: auto, block, dots, none"),
        ("train.dtype", "fp16", "config.train.dtype is 'fp16'"),
        ("optimizer", "adamw", "did you mean 'AdamW'"),
        ("optimizer", "none", "unknown Optimizer 'none'"),
        ("optimizer", "TextFiles(path='x')", "unknown Optimizer 'TextFiles'"),
        ("data.source", "AdamW()", "unknown Source 'AdamW'"),
        ("data.packing", "WarmupCosine", "unknown Packing 'WarmupCosine'"),
        ("objective.mask_unit", "WholeWords()", "no field 'mask_unit'"),
        ("model.position", "Unigram()", "unknown Position 'Unigram'"),
        ("model.generator", "AdamW()", "unknown Generator 'AdamW'"),
        ("model.generator", "Generator(layers=2)", "Generator has no field 'layers'"),
        ("model.generator", "Generator(num_layers='2')", "Generator.num_layers is '2'"),
        ("model.generator", "Generator(num_heads=0)", "config.model.generator.num_heads is 0"),
        ("model.layer_pattern", "local,globl", "each 'global' or 'local'"),
        ("model.layer_pattern", "7", "each 'global' or 'local'"),
        ("tokenizer", "gpt2", "unknown TokenizerConfig 'gpt2'"),
        ("schedule", "WarmupLinear(warmup_steps=1e3)", "WarmupLinear.warmup_steps is 1000.0"),
        ("schedule", "__import__('os').system('true')", "cannot read"),
        ("data.source", "TextFiles(path='\\0')", "zero byte"),
        ("data.source", "TextFiles(path='\\ud800')", "not UTF-8"),
    ]


def _of_paths():
    """Flags and fields with paths: object stores, and names that are not UTF-8."""
    paths = itertools.cycle(NO_PATHS.items())
    source = "--config.data.source"
    flags = [
        ("main", [TINY], "--workdir"),
        ("generate", ["a"], "--from"),
        ("generate", ["--from=x"], "--input"),
        ("generate", ["--from=x", "--input=x"], "--output"),
        ("predict", [], "--from"),
        ("predict", ["--from=x"], "--input"),
        ("predict", ["--from=x", "--input=x"], "--output"),
        *(("evaluate", [], flag) for flag in ("--workdir", "--from", "--output", "--compare-with", "--transcripts")),
        ("huggingface", ["import"], "--from"),
        ("huggingface", ["import", "--from=x"], "--workdir"),
        ("huggingface", ["import", "--from=x", "--workdir=x"], "--base"),
        ("huggingface", ["export", "--workdir=x"], "--to"),
        ("tokenizer", ["train", TINY], "--to"),
        ("tokenizer", ["encode"], "--tokenizer"),
        ("prepare", [TINY], "--report"),
        *(("inspect", [TINY, *more], flag) for more, flag in (((), "--html"), (("--widths=32,64",), "--picture"))),
        ("recipe", ["--config=gpt2", "--check"], "--copies"),
        ("verify_resume", [TINY], "--record"),
        ("plan", [], "--fit"),
        ("plan", ["--fit=x"], "--to"),
        ("profile", [], "--workdir"),
        ("profile", ["--workdir=x"], "--picture"),
        ("plan", ["--flops=1e18"], "--law"),
        ("plan", [TINY], "--transfer_from"),
        ("main", [], "--config"),
    ]
    fields = [
        *((TINY, f"--config.{field}") for field in ("data.cache_dir", "checkpoint.init_from", "tokenizer.path")),
        *((TINY, f"{source}.{field}") for field in ("path", "valid_path")),
    ]
    choices = [
        f"{source}=TextFiles(path='%s')",
        f"{source}=JsonLines(path='x', valid_path='%s')",
        f"{source}=ConllFiles(path='%s')",
        f"{source}=Parquet(path='%s')",
        f"{source}=Tsv(path='%s')",
        f"{source}=Csv(path='x', valid_path='%s')",
        f"{source}=ArrayRecord(path='%s')",
        f"{source}=SourceMixture(sources=(PythonDocs(), TextFiles(path='%s')), weights=(1, 2))",
        "--config.tokenizer=PretrainedTokenizer(path='%s')",
        "--config.objective=MaskedLM(mask_unit=WholeWords(word_list='%s'))",
        "--config.objective=MaskedLM(similar_words='%s')",
    ]
    for command, words, flag in flags:
        path, said = next(paths)
        yield command, [*words, f"{flag}={path}"], said
        yield command, [*words, f"{flag}={NOT_UTF8}"], "not UTF-8"
    for config, flag in fields:
        path, said = next(paths)
        yield "main", [config, f"{flag}={path}"], said
        yield "main", [config, f"{flag}={NOT_UTF8}"], "not UTF-8"
    for choice in choices:
        path, said = next(paths)
        yield "prepare", [TINY, choice % path], said
    yield "main", [TINY, "--workdir", NOT_UTF8], "not UTF-8"


def _of_config_files(folder: pathlib.Path):
    """Values of --config, and expected words."""
    tiny = f"import runpy\ntiny = runpy.run_path({str(ROOT / 'tests/support/tiny.py')!r})['get_config']\n"
    changed = tiny + "def get_config(variant=''):\n    config = tiny('gpt')\n    {}\n    return config\n"
    files = {
        "nothing.py": ("x = 1\n", "has no function get_config"),
        "syntax.py": ("x = 1\ndef get_config(:\n", "syntax.py:2: SyntaxError"),
        "spaces.py": ("def get_config(variant=''):\n\treturn 1\n        return 2\n", "spaces.py:3: TabError"),
        "zero.py": ("x = 1\0\n", "zero.py"),
        "imports.py": ("\nimport no_such_package\n", "imports.py:2: ModuleNotFoundError"),
        "raises.py": ("def get_config(variant=''):\n    return 1 / 0\n", "raises.py:2: ZeroDivisionError"),
        "none.py": ("def get_config(variant=''):\n    pass\n", "get_config returned NoneType"),
        "dict.py": ("def get_config(variant=''):\n    return {}\n", "get_config returned dict"),
        "needs.py": ("def get_config(variant):\n    return 1\n", "missing 1 required positional argument"),
        "kind.py": (changed.format("config.optimizer = config.data.source"), "it must be of kind Optimizer"),
        "part.py": (changed.format("config.model = config.train"), "config.model is TrainConfig("),
        "word.py": (changed.format("config.train.steps = 'many'"), "config.train.steps is 'many'"),
        "float.py": (changed.format("config.train.steps = 1e3"), "config.train.steps is 1000.0"),
        "none_field.py": (changed.format("config.train.steps = None"), "config.train.steps is None"),
        "huge.py": (changed.format("config.train.steps = 10**9999"), "config.train.steps is of 33"),
        "in_choice.py": (changed.format("config.schedule.warmup_steps = 'x'"), "config.schedule.warmup_steps is 'x'"),
        "nan.py": (changed.format("config.optimizer.learning_rate = float('nan')"), "learning_rate is nan"),
        "scheme.py": (changed.format("config.data.cache_dir = 'hdfs://a/b'"), "not a supported store"),
    }
    for name, (content, said) in files.items():
        (folder / name).write_text(content)
        yield folder / name, said
    run = folder / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    os.mkfifo(folder / "fifo.py")
    (folder / "endless.py").symlink_to("/dev/zero")
    (folder / "loop.py").symlink_to("loop.py")
    yield run, "is a run folder"
    yield run / "config.json", "is JSON"
    yield folder, "is a folder, it must be a Python file"
    yield f"{folder}/raises.py:base", "raises.py:2: ZeroDivisionError"
    yield f"{ROOT}/configs/t5_base.py:bse", "did you mean 'base'"
    yield f"{ROOT}/configs/t5_base", f"did you mean '{ROOT}/configs/t5_base.py'"
    yield f"{ROOT}/configs/t5_bas.py", f"did you mean '{ROOT}/configs/t5_base.py'"
    yield from ((folder / name, "no config file") for name in ("fifo.py", "endless.py", "loop.py", "missing.py"))
    yield "", "no config file"


# --- run the commands ------------------------------------------------------------------------------------------------


def fault(mistake: Mistake, folder: pathlib.Path) -> str:
    """Runs a command in a new subfolder of `folder`; returns its failure, or an empty string."""
    place = pathlib.Path(tempfile.mkdtemp(dir=folder))
    (place / "configs").symlink_to(ROOT / "configs")

    def run() -> None:
        os.chdir(place)
        sys.argv = [f"{mistake.command}.py", *mistake.words]
        runpy.run_module(f"pretrainax.{mistake.command}", run_name="__main__", alter_sys=True)

    code, text = run_forked(run, folder / f"{place.name}.txt", SECONDS)
    if code != 2 or len(text.splitlines()) != 1:
        return f"exit code {code}: {text[-1500:]}"
    if mistake.said not in text:
        return f"{mistake.said!r} is not in {text[:600]!r}"
    left = set(os.listdir(place)) - {"configs"}
    return f"files left: {left}" if left else ""


def answer_all(only: str = "") -> tuple[int, list[str]]:
    """Returns the number of command lines tried, and a line for each failure."""
    from pretrainax import cli, interop, planning, training  # noqa: F401 modules of the commands, imported once
    from pretrainax.data.inspection import page  # noqa: F401
    from pretrainax.interop import directories  # noqa: F401
    from pretrainax.planning import compiled, plans_page, report, search  # noqa: F401
    from pretrainax.runs import resume_check, train  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="mistakes") as scratch:
        folder = pathlib.Path(scratch)
        os.environ["HOME"] = str(folder / "home")
        (folder / "files").mkdir()
        asked = [m for m in mistakes(folder / "files") if only in " ".join((m.command, *m.words))]
        faults = []
        for mistake in asked:
            if wrong := fault(mistake, folder):
                words = " ".join(word if len(word) < 200 else f"{word[:100]}…" for word in mistake.words)
                faults.append(f"{mistake.command} {words}: {wrong}".encode(errors="replace").decode())
                print(faults[-1], flush=True)
    return len(asked), faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs only command lines with this substring")
    started = time.perf_counter()
    count, faults = answer_all(parser.parse_args().only)
    print(f"{count:,} mistakes, {len(faults)} failures, {time.perf_counter() - started:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
