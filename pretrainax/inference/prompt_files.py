"""Files of prompts, and of the texts that were written after them, which a command that was cut short goes on with."""

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
    """Returns the prompts of a file of JSON lines: a string each, or an object with a "prompt".

    Raises:
      UserError: no such file, or what is wrong with a line of it, with its number.
    """
    try:
        check_regular(path)
        with open(path, "rb") as f:
            lines = f.read().splitlines()
    except OSError as e:
        raise UserError(f"--input={path} cannot be read: {e.strerror}") from e
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f'{path}, line {number} is no JSON ({e}): write "a prompt" or {{"prompt": "…"}}') from e
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str):
            raise UserError(f'{path}, line {number} holds no prompt: write "a prompt" or {{"prompt": "…"}}')
        prompts.append(prompt)
    return prompts


class Outputs:
    """A file with a line of JSON for each prompt, in their order; beside it, the settings it was made with.

    Raises:
      UserError: what is there was made with other settings, or of other prompts.
    """

    def __init__(self, path: str, settings: JsonObject, prompts: Sequence[str]):
        self.path = path
        beside = f"{path}.settings.json"
        settings = json.loads(json.dumps(settings))
        try:
            if os.path.exists(path):
                self._check_settings(beside, settings)
            else:
                write_atomically(beside, json.dumps(settings, indent=2) + "\n")
            self.file: IO[bytes] = open(path, "ab+")
        except OSError as e:
            raise UserError(f"--output={path} cannot be written: {e.strerror}") from e
        self.done = self._done(prompts)

    def _check_settings(self, beside: str, settings: JsonObject) -> None:
        if not os.path.exists(beside):
            raise UserError(
                f"--output={self.path} is there, and {beside}, which says how it was made, is not: take another file"
            )
        before = read_object(beside)
        changed = sorted(name for name in {*before, *settings} if before.get(name) != settings.get(name))
        if changed:
            name = changed[0]
            raise UserError(
                f"--output={self.path} was made with {name} {before.get(name)!r}, now it is {settings.get(name)!r}: "
                "take another file, or the same settings"
            )

    def _done(self, prompts: Sequence[str]) -> int:
        """Returns how many prompts are done; a last line that was not finished is cut off."""
        self.file.seek(0)
        content = self.file.read()
        end = content.rfind(b"\n") + 1
        self.file.truncate(end)
        lines = content[:end].splitlines()
        for number, line in enumerate(lines):
            prompt = prompts[number] if number < len(prompts) else None
            try:
                same = json.loads(line)["prompt"] == prompt
            except (ValueError, TypeError, KeyError):
                same = False
            if not same:
                raise UserError(
                    f"--output={self.path}, line {number + 1} is not of the prompt in that line of the input: take "
                    "another file"
                )
        return len(lines)

    def add(self, prompts: Sequence[str], texts: Sequence[Generated], log_probs: bool) -> None:
        """Writes a line for each of the next prompts, with its texts."""
        for number, prompt in enumerate(prompts, self.done):
            described = [described_as_json(text, log_probs) for text in texts if text.prompt == number]
            self.file.write(json.dumps({"prompt": prompt, "texts": described}, ensure_ascii=False).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.done += len(prompts)


def described_as_json(text: Generated, log_probs: bool) -> JsonObject:
    """Returns a text as the object that stands for it in a file; `log_probs`: with its tokens."""
    fields = dataclasses.asdict(text)
    hidden = {"prompt"} | (set() if log_probs else {"ids", "log_probs"}) | ({"score"} if text.score is None else set())
    return {name: value for name, value in fields.items() if name not in hidden}
