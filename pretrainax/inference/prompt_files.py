"""Reads prompts from files, and writes generated text to files that an interrupted command can continue."""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import IO

from pretrainax.config import UserError
from pretrainax.files.atomic_files import write_atomically
from pretrainax.files.json_files import JsonObject, read_object
from pretrainax.files.regular_files import check_regular
from pretrainax.inference.decoding import Generated


def read_prompts(path: str) -> list[str]:
    """Reads prompts from a JSON lines file; each line is a string or an object with a field "prompt", or blank.

    Raises:
      UserError: the file cannot be read, or a line is invalid; the message gives the line number.
    """
    try:
        check_regular(path)
        with open(path, "rb") as f:
            lines = f.read().splitlines()
    except OSError as e:
        raise UserError(f"--input={path} cannot be read: {e.strerror}") from e
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f'{path}, line {number} is no JSON ({e}): write "a prompt" or {{"prompt": "…"}}') from e
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            raise UserError(f'{path}, line {number} has no prompt: write "a prompt" or {{"prompt": "…"}}')
        try:
            prompt.encode()
        except UnicodeEncodeError as e:  # an unpaired surrogate
            raise UserError(f"{path}, line {number}: {e}") from e
        prompts.append(prompt)
    return prompts


class Outputs:
    """Writes generated text to a JSON lines file, one line per prompt, and the settings to a second file.

    The attribute `done` is the number of prompts that are already in the file.

    Args:
      path: path of the output file. The file may exist already, with the lines for the first prompts.
      settings: the generation settings.
      prompts: all prompts of the input, in order.

    Raises:
      UserError: an existing file has different settings or different prompts, or the file cannot be written.
    """

    def __init__(self, path: str, settings: JsonObject, prompts: Sequence[str]):
        self.path = path
        settings_path = f"{path}.settings.json"
        settings = json.loads(json.dumps(settings))
        try:
            if os.path.exists(path):
                self._check_settings(settings_path, settings)
            else:
                write_atomically(settings_path, json.dumps(settings, indent=2) + "\n")
            self.file: IO[bytes] = open(path, "ab+")
        except OSError as e:
            raise UserError(f"--output={path} cannot be written: {e.strerror}") from e
        self.done = self._count_finished(prompts)

    def _check_settings(self, settings_path: str, settings: JsonObject) -> None:
        """Raises UserError if the existing output file was written with different settings."""
        if not os.path.exists(settings_path):
            raise UserError(
                f"--output={self.path} exists without its settings in {settings_path}: set another --output"
            )
        previous = read_object(settings_path)
        # A file of an earlier version lacks options; an option that is missing is not set.
        before, now = ({k: v for k, v in x.items() if v is not False and v != []} for x in (previous, settings))
        changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if changed:
            name = changed[0]
            raise UserError(
                f"--output={self.path} was written with {name} {previous.get(name)!r}, now {name} is "
                f"{settings.get(name)!r}: set another --output, or the same settings"
            )

    def _count_finished(self, prompts: Sequence[str]) -> int:
        """Counts the complete lines in the file, and removes an incomplete last line.

        Raises:
          UserError: the prompt of a line differs from the corresponding prompt of the input.
        """
        self.file.seek(0)
        content = self.file.read()
        end = content.rfind(b"\n") + 1
        self.file.truncate(end)
        lines = content[:end].splitlines()
        for number, line in enumerate(lines):
            prompt = prompts[number] if number < len(prompts) else None
            try:
                matches = json.loads(line)["prompt"] == prompt
            except (ValueError, TypeError, KeyError):
                matches = False
            if not matches:
                raise UserError(
                    f"--output={self.path}, line {number + 1} has another prompt than prompt {number + 1} of the "
                    "input: set another --output"
                )
        return len(lines)

    def add(self, prompts: Sequence[str], texts: Sequence[Generated], log_probs: bool) -> None:
        """Writes the generated text for the next prompts, one line per prompt, and flushes the file to disk.

        Args:
          prompts: the next prompts, in order.
          texts: the generated texts for these prompts.
          log_probs: whether to add the token ids and their log-probabilities.
        """
        for number, prompt in enumerate(prompts, self.done):
            text_objects = [described_as_json(text, log_probs) for text in texts if text.prompt == number]
            self.file.write(json.dumps({"prompt": prompt, "texts": text_objects}, ensure_ascii=False).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.done += len(prompts)


def described_as_json(text: Generated, log_probs: bool) -> JsonObject:
    """Converts a generated text to a JSON object, without the index of the prompt.

    Args:
      log_probs: whether to add the token ids and their log-probabilities.
    """
    fields = dataclasses.asdict(text)
    omitted = {"prompt"} | (set() if log_probs else {"ids", "log_probs"}) | ({"score"} if text.score is None else set())
    return {name: value for name, value in fields.items() if name not in omitted}
