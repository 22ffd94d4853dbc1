"""Lets a trained model write: `python -m pretrainax.generate --from=DIR "Once upon a time" [--temperature=0.8]`.

DIR is a run (its newest checkpoint), DIR@2000, DIR@best, DIR@average, DIR@ema, an export, a Hugging Face directory or
hf:org/name[@revision]. A decoder goes on with the text. An encoder-decoder answers it, or fills in its spans: "The
<extra_id_0> walks in <extra_id_1> park". One prompt is shown while it is written; several are written together.

    python -m pretrainax.generate --from=DIR --input=prompts.jsonl --output=texts.jsonl

does a file of prompts, one a line: a JSON string, or an object with a "prompt". Each gives a line of the output, in the
same order. A command that was cut short goes on where it was when it is given again; with other settings it is refused.

    python -m pretrainax.generate --from=DIR --fill=5 "The [MASK] walks in the park."

fills in the holes of texts, with what any model is asked for that was trained to, encoders too; docs/use.md says more.

Rates come last, on stderr.
"""

import dataclasses
import os
import sys
import typing
from collections.abc import Sequence
from typing import Any

from absl import flags

from pretrainax import cli
from pretrainax import config as config_lib
from pretrainax.config import DataConfig, UserError
from pretrainax.config.reference import fields_of
from pretrainax.files.paths import define_path
from pretrainax.inference.decoding import Generated, Rates, Sampling, generate
from pretrainax.inference.language_model import LanguageModel
from pretrainax.inference.load import load_origin
from pretrainax.inference.prompt_files import Outputs, read_prompts
from pretrainax.interop.origin import NAMES, find_origin
from pretrainax.reporting.visible import visible
from pretrainax.runtime import host


def main() -> None:
    """Defines the flags, and runs the command: here, as other commands have flags of the same names."""
    asked = {
        "from": define_path("from", None, NAMES, takes_hub=True),
        "input": define_path("input", None, "Prompts, a line of JSON each"),
        "output": define_path("output", None, "--input: the file of the texts"),
        "batch_size": flags.DEFINE_integer("batch_size", 16, "Prompts that are written at a time", lower_bound=1),
        "fill": flags.DEFINE_integer(
            "fill", None, "Fills in the holes of the texts, and shows so many candidates of each", lower_bound=1
        ),
        "log_probs": flags.DEFINE_bool("log_probs", False, "Each token with its log-probability, in nats"),
        "dtype": flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of the computation; else as the run's"),
    }
    options = _define_options()
    command = Generation(asked, options)
    cli.run(command.run, texts=True)


def _define_options() -> dict[str, flags.FlagHolder]:
    """Defines a flag for each field of `Sampling`."""
    kinds = typing.get_type_hints(Sampling)
    defined = {}
    for field, said in zip(dataclasses.fields(Sampling), fields_of(Sampling), strict=True):
        kind = kinds[field.name]
        default: Any = field.default
        if typing.get_origin(kind) is tuple:
            holder = flags.DEFINE_multi_string(field.name, [], f"{said.meaning} (text; may be given several times)")
        elif str in typing.get_args(kind):
            holder = flags.DEFINE_string(field.name, default, said.meaning)
        elif int in (kind, *typing.get_args(kind)):
            holder = flags.DEFINE_integer(field.name, default, said.meaning)
        else:
            holder = flags.DEFINE_float(field.name, default, said.meaning)
        defined[field.name] = holder
    return defined


class Generation:
    """Does what the flags ask for."""

    def __init__(self, asked: dict[str, flags.FlagHolder], options: dict[str, flags.FlagHolder]):
        self._asked, self._options = asked, options

    def __getitem__(self, flag: str) -> Any:
        return self._asked[flag].value

    def run(self, *texts: str) -> int:
        """Writes after the prompts of the command line, or of a file."""
        sampling = self._sampling()
        for name in ("config", "workdir"):
            if flags.FLAGS[name].present:
                raise UserError(f"--{name} is not for this command: give the run, or the directory, as --from=DIR")
        if not self["from"]:
            raise UserError(f"--from is missing: {NAMES}")
        if self["fill"]:
            return self._fill(texts)
        if bool(texts) == bool(self["input"]):
            raise UserError(
                'give prompts, as "Once upon a time", or a file of them, --input=prompts.jsonl: one of both'
            )
        if bool(self["input"]) != bool(self["output"]):
            raise UserError("--input=prompts.jsonl and --output=texts.jsonl belong together: give both or none")
        prompts = read_prompts(self["input"]) if self["input"] else list(texts)
        model, rates = self._load(), Rates()
        if self["output"]:
            self._write_file(model, sampling, prompts, rates)
        else:
            self._show(model, sampling, prompts, rates)
        print(rates_line(rates), file=sys.stderr)
        return 0

    def _fill(self, texts: Sequence[str]) -> int:
        """Prints each text with its holes filled in, and the candidates of each hole."""
        asked, options = ("from", "fill", "dtype"), ("max_new_tokens",)
        others = {name: x for name, x in self._asked.items() if name not in asked}
        others |= {name: x for name, x in self._options.items() if name not in options}
        if given := [name for name, holder in others.items() if holder.present]:
            raise UserError(f"--{given[0]} is not for --fill, which takes --from, --dtype and --max_new_tokens")
        if not texts:
            raise UserError('give texts with holes, as "The [MASK] walks in the park."')
        model, most = self._load(), self._options["max_new_tokens"]
        for text in texts:
            filled = model.fill(text, self["fill"], max_new_tokens=most.value if most.present else None)
            _print(f"{filled.text}\n")
            for number, candidates in enumerate(filled.holes, start=1):
                for candidate in candidates:
                    _print(f"  hole {number}  {candidate.probability:.4f}  {candidate.text!r}\n")
        return 0

    def _sampling(self) -> Sampling:
        values = {name: holder.value for name, holder in self._options.items()}
        for name, value in values.items():
            if isinstance(value, list):  # a shell gives no line breaks easily
                values[name] = tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in value)
        sampling = Sampling(**values)
        sampling.check()
        return sampling

    def _load(self) -> LanguageModel:
        origin = find_origin(self["from"])
        data = DataConfig if not origin.steps else config_lib.load(os.path.join(origin.directory, "config.json")).data
        host.keep_compiled(data.cache_dir)
        host.start_devices()
        return load_origin(origin, self["dtype"])

    def _write_file(self, model: LanguageModel, sampling: Sampling, prompts: Sequence[str], rates: Rates) -> None:
        settings = {"from": model.origin, "dtype": model.model.compute.dtype, **dataclasses.asdict(sampling)}
        outputs = Outputs(self["output"], {**settings, "log_probs": self["log_probs"]}, prompts)
        if outputs.done:
            print(f"{outputs.done:,} of {len(prompts):,} prompts are done", file=sys.stderr)
        while outputs.done < len(prompts):
            some = prompts[outputs.done : outputs.done + self["batch_size"]]
            texts = generate(model, some, sampling, first=outputs.done, batch_size=len(some), rates=rates)
            outputs.add(some, texts, self["log_probs"])
        print(f"{outputs.done:,} prompts done: {outputs.path}", file=sys.stderr)

    def _show(self, model: LanguageModel, sampling: Sampling, prompts: Sequence[str], rates: Rates) -> None:
        """Prints the texts: one while it is written, several when they are there."""
        streams = len(prompts) == 1 and sampling.num_return == 1
        goes_on = model.config.family == "decoder"
        shown = [prompts[0]] if streams and goes_on else []  # once something follows

        def show(number: int, text: str) -> None:
            _print(f"{shown.pop() if shown else ''}{text}")

        on_text = show if streams else None
        texts = generate(model, prompts, sampling, on_text, batch_size=self["batch_size"], rates=rates)
        if streams:
            _print("\n")
        for text in texts:
            if not streams:
                number = f"[score {text.score:.3f}] " if text.score is not None else ""
                _print(f"{number}{prompts[text.prompt]}{'' if goes_on else ' ⟶ '}{text.text}\n")
            if self["log_probs"]:
                self._print_tokens(model, text)
            if text.ended == "context":
                print(f"prompt {text.prompt + 1}: the context of the model is full", file=sys.stderr)

    def _print_tokens(self, model: LanguageModel, text: Generated) -> None:
        for i, log_prob in zip(text.ids, text.log_probs, strict=True):
            _print(f"  {log_prob:9.4f}  {model.tokenizer.decode([i])!r}\n")


def _print(text: str) -> None:
    print(visible(text), end="", flush=True)


def rates_line(rates: Rates) -> str:
    """Returns how fast a model read and wrote."""
    prefill = f"prefill: {rates.prompt_tokens:,} tokens in {rates.prefill_seconds:.2f} s, compilation included"
    if not rates.steps:
        return prefill
    each = rates.step_seconds / rates.steps
    return (
        f"{prefill}; steps: {rates.step_tokens:,} tokens in {rates.step_seconds:.2f} s, "
        f"{rates.step_tokens / rates.step_seconds:,.0f} tokens/s, {1000 * each:,.2f} ms a step"
    )


if __name__ == "__main__":
    main()
