"""Generates text with a model: `python -m pretrainax.generate --from=DIR "Once upon a time" [--temperature=0.8]`.

DIR is a run (its newest checkpoint), DIR@2000, DIR@best, DIR@average, DIR@ema, an export, a Hugging Face directory or
hf:org/name[@revision]. A decoder continues the prompt. An encoder-decoder generates a response to the prompt, or fills
its spans: "The <extra_id_0> walks in <extra_id_1> park". The text of a single prompt is printed while it is generated.
Several prompts are processed in batches.

    python -m pretrainax.generate --from=DIR --input=prompts.jsonl --output=texts.jsonl

reads one prompt per line, a JSON string or an object with the key "prompt", and writes one line per prompt, in order.
The same command continues an interrupted output file. Continuing the file with different settings is an error.

    python -m pretrainax.generate --from=DIR --fill=5 "The [MASK] walks in the park."

fills the masks of a text and prints 5 candidates for each mask. This also works for encoders: see docs/how-to/fill.md.

The settings in the generation_config.json of a Hugging Face directory are the defaults of the flags; a line on stderr
lists them. --ignore=FIELD ignores a field of this file, and --ignore=all ignores the file: see docs/how-to/generate.md.

The last line, on stderr, reports the tokens per second.
"""

import dataclasses
import os
import sys
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from absl import flags

from pretrainax import cli
from pretrainax import config as config_lib
from pretrainax.config import DataConfig, UserError
from pretrainax.config.reference import fields_of
from pretrainax.files.errors import counted
from pretrainax.files.json_files import JsonObject
from pretrainax.files.paths import MODEL_NAMES, define_path
from pretrainax.inference.request import EarlyStopping, Sampling, invalid_values
from pretrainax.reporting.visible import visible

if TYPE_CHECKING:  # the methods import the rest, because JAX takes seconds, for which --help must not wait
    from pretrainax.inference.decoding import Generated, Rates
    from pretrainax.inference.language_model import LanguageModel


def main() -> None:
    """Defines the flags and runs the command.

    The flags are not defined on import, because other commands define flags with the same names.
    """
    command_flags = {
        "from": define_path("from", None, MODEL_NAMES, takes_hub=True),
        "input": define_path("input", None, "File of prompts, a line of JSON for each"),
        "output": define_path("output", None, "--input: file for the generated texts, a line of JSON for each prompt"),
        "batch_size": flags.DEFINE_integer(
            "batch_size", 16, "Number of prompts to generate for at a time", lower_bound=1
        ),
        "fill": flags.DEFINE_integer(
            "fill", None, "Fill the holes of the texts and print this number of candidates for each hole", lower_bound=1
        ),
        "log_probs": flags.DEFINE_bool(
            "log_probs", False, "Also print or write each token with its log-probability, in nats"
        ),
        "ignore": flags.DEFINE_list(
            "ignore",
            [],
            "Fields of the model's generation_config.json to ignore, such as top_k; all: all of its settings",
        ),
        "dtype": flags.DEFINE_enum(
            "dtype", None, ["float32", "bfloat16"], "dtype of the computation; by default the dtype of the run"
        ),
    }
    options = _define_options()
    command = Generation(command_flags, options)
    cli.run(command.run, texts=True, run_flags=())


def _define_options() -> dict[str, flags.FlagHolder]:
    """Defines a flag for each field of `Sampling`, and returns the flags by field name."""
    hints = typing.get_type_hints(Sampling)
    holders = {}
    for field, reference in zip(dataclasses.fields(Sampling), fields_of(Sampling), strict=True):
        hint = hints[field.name]
        default: Any = field.default
        if field.name == "banned_sequences":
            continue  # lists of ids, which are not for a shell: --banned_strings
        if hint == Optional[bool]:
            holder = flags.DEFINE_bool(field.name, default, reference.meaning)
        elif hint == Optional[EarlyStopping]:
            holder = flags.DEFINE_enum(field.name, default, [*_EARLY_STOPPING], reference.meaning)
        elif hint == tuple[int, ...]:
            holder = flags.DEFINE_multi_integer(field.name, [], reference.meaning)
        elif typing.get_origin(hint) is tuple:
            holder = flags.DEFINE_multi_string(field.name, [], reference.meaning)
        elif str in typing.get_args(hint):
            holder = flags.DEFINE_string(field.name, default, reference.meaning)
        elif int in (hint, *typing.get_args(hint)):
            holder = flags.DEFINE_integer(field.name, default, reference.meaning)
        else:
            holder = flags.DEFINE_float(field.name, default, reference.meaning)
        holders[field.name] = holder
    return holders


_EARLY_STOPPING = {"true": True, "false": False, "never": "never"}  # flag -> value
_EARLY_ENDS = {  # `Generated.ended` -> the reason to print
    "context": "the context of the model is full",
    "blocked": "the flags allow no further token",
}


class Generation:
    """Implements the command `pretrainax generate`."""

    def __init__(self, asked: dict[str, flags.FlagHolder], options: dict[str, flags.FlagHolder]):
        self._flags, self._options = asked, options

    def __getitem__(self, flag: str) -> Any:
        return self._flags[flag].value

    def run(self, *texts: str) -> int:
        """Generates text for the prompts in the arguments or in the --input file. Returns the exit code."""
        from pretrainax.inference.decoding import Rates
        from pretrainax.inference.inherited import request_of
        from pretrainax.inference.prompt_files import read_prompts

        given = self._given()
        if not self["from"]:
            raise UserError(f"--from is missing: set it to {MODEL_NAMES}")
        if self["fill"]:
            return self._fill(texts)
        if bool(texts) == bool(self["input"]):
            raise UserError(
                'give either prompts, such as "Once upon a time", or a file of prompts, --input=prompts.jsonl'
            )
        if bool(self["input"]) != bool(self["output"]):
            raise UserError("--input=prompts.jsonl and --output=texts.jsonl need each other: give both or none")
        prompts = read_prompts(self["input"]) if self["input"] else list(texts)
        model, rates = self._load(), Rates()
        sampling, notes = request_of(model, given, self["ignore"])
        for note in notes:
            print(visible(note), file=sys.stderr)
        if self["output"]:
            self._write_file(model, sampling, prompts, rates)
        else:
            self._show(model, sampling, prompts, rates)
        print(rates_line(rates), file=sys.stderr)
        return 0

    def _fill(self, texts: Sequence[str]) -> int:
        """Prints each text with its masks filled, followed by the candidates for each mask. Returns the exit code."""
        allowed, allowed_options = ("from", "fill", "dtype"), ("max_new_tokens",)
        unsupported = {name: x for name, x in self._flags.items() if name not in allowed}
        unsupported |= {name: x for name, x in self._options.items() if name not in allowed_options}
        if conflicting := [name for name, holder in unsupported.items() if holder.present]:
            raise UserError(f"--{conflicting[0]} is not for --fill, which takes --from, --dtype and --max_new_tokens")
        if not texts:
            raise UserError('give texts with holes, such as "The [MASK] walks in the park."')
        model, token_limit = self._load(), self._options["max_new_tokens"]
        for text in texts:
            filled = model.fill(text, self["fill"], max_new_tokens=token_limit.value if token_limit.present else None)
            _print(f"{filled.text}\n")
            for number, candidates in enumerate(filled.holes, start=1):
                for candidate in candidates:
                    _print(f"  hole {number}  {candidate.probability:.4f}  {candidate.text!r}\n")
        return 0

    def _given(self) -> JsonObject:
        """Returns the options that flags set; raises UserError if a value is out of range."""
        given = {name: holder.value for name, holder in self._options.items() if holder.present}
        for name, value in given.items():
            if isinstance(value, list):  # escapes, because line breaks are hard to type in a shell
                escaped = (x.replace("\\n", "\n").replace("\\t", "\t") if isinstance(x, str) else x for x in value)
                given[name] = tuple(escaped)
            elif name == "early_stopping":
                given[name] = _EARLY_STOPPING[value]
        if problems := list(invalid_values(given)):  # before the model is loaded
            raise UserError("; ".join(problems))
        return given

    def _load(self) -> "LanguageModel":
        from pretrainax.inference.load import load_origin
        from pretrainax.interop.origin import find_origin
        from pretrainax.runtime import host

        origin = find_origin(self["from"])
        data = DataConfig if not origin.steps else config_lib.load(os.path.join(origin.directory, "config.json")).data
        host.enable_compilation_cache(data.cache_dir)
        host.start_devices()
        return load_origin(origin, self["dtype"])

    def _write_file(self, model: "LanguageModel", sampling: Sampling, prompts: Sequence[str], rates: "Rates") -> None:
        from pretrainax.inference.decoding import generate
        from pretrainax.inference.prompt_files import Outputs

        settings = {"from": model.origin, "dtype": model.model.compute.dtype, **dataclasses.asdict(sampling)}
        outputs = Outputs(self["output"], {**settings, "log_probs": self["log_probs"]}, prompts)
        if outputs.done:
            print(f"{outputs.done:,} of {len(prompts):,} prompts are done", file=sys.stderr)
        while outputs.done < len(prompts):
            batch = prompts[outputs.done : outputs.done + self["batch_size"]]
            samples = generate(model, batch, sampling, first=outputs.done, batch_size=len(batch), rates=rates)
            outputs.add(batch, samples, self["log_probs"])
        print(f"{outputs.done:,} prompts done: {outputs.path}", file=sys.stderr)

    def _show(self, model: "LanguageModel", sampling: Sampling, prompts: Sequence[str], rates: "Rates") -> None:
        """Generates and prints `num_return` texts per prompt; a single text is printed while it is generated."""
        from pretrainax.inference.decoding import generate

        is_streamed = len(prompts) == 1 and sampling.num_return == 1
        is_decoder = model.config.family == "decoder"
        pending_prompt = [prompts[0]] if is_streamed and is_decoder else []  # printed with the first text, if any

        def print_text(number: int, text: str) -> None:
            _print(f"{pending_prompt.pop() if pending_prompt else ''}{text}")

        on_text = print_text if is_streamed else None
        samples = generate(model, prompts, sampling, on_text, batch_size=self["batch_size"], rates=rates)
        if is_streamed:
            _print(f"{''.join(pending_prompt)}\n")
        for sample in samples:
            if not is_streamed:
                score = f"[score {sample.score:.3f}] " if sample.score is not None else ""
                _print(f"{score}{prompts[sample.prompt]}{'' if is_decoder else ' ⟶ '}{sample.text}\n")
            if self["log_probs"]:
                self._print_tokens(model, sample)
            if reason := _EARLY_ENDS.get(sample.ended):
                print(f"prompt {sample.prompt + 1}: the text ends here, because {reason}", file=sys.stderr)

    def _print_tokens(self, model: "LanguageModel", sample: "Generated") -> None:
        for i, log_prob in zip(sample.ids, sample.log_probs, strict=True):
            _print(f"  {log_prob:9.4f}  {model.tokenizer.decode([i])!r}\n")


def _print(text: str) -> None:
    print(visible(text), end="", flush=True)


def rates_line(rates: "Rates") -> str:
    """Formats a line with the number of tokens and the time of prefill and of decoding."""
    prefill = f"prefill: {counted(rates.prompt_tokens, 'token')} in {rates.prefill_seconds:.2f} s, compilation included"
    if not rates.steps:
        return prefill
    seconds_per_step = rates.step_seconds / rates.steps
    return (
        f"{prefill}; steps: {counted(rates.step_tokens, 'token')} in {rates.step_seconds:.2f} s, "
        f"{rates.step_tokens / rates.step_seconds:,.0f} tokens/s, {1000 * seconds_per_step:,.2f} ms per step"
    )


if __name__ == "__main__":
    main()
