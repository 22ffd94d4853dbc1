"""Runs the commands by one name: `pretrainax train --config=…` is `python -m pretrainax.main --config=…`."""

import importlib.util
import os
import pathlib
import runpy
import sys

from pretrainax.config import UserError, nearest
from pretrainax.config.reference import docstring_of, first_sentence
from pretrainax.reporting.tables import text_table

# In the order in which they are wanted; with - where a module has _.
MODULES = {"train": "main"} | {
    name.replace("_", "-"): name
    for name in (
        "tokenizer prepare prepare_beam inspect recipe plan profile report evaluate generate predict huggingface "
        "verify_resume zoo"
    ).split()
}


def main() -> None:
    """Runs the command that is named first, in this process, with the flags, output and exit code of its module."""
    name, rest = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in ("--help", "-h"):
        print(_commands())
        return
    module = MODULES.get(name, name)
    if module not in MODULES.values():
        print(f"pretrainax: no command {name!r}, {nearest(name, MODULES)}", file=sys.stderr)
        sys.exit(UserError.exit_code)
    sys.argv = [name, *rest]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as python -m does: a config file may import what lies beside it
    runpy.run_module(f"pretrainax.{module}", run_name="__main__", alter_sys=True)


def _commands() -> str:
    rows = [(name, first_sentence(_docstring(module))) for name, module in MODULES.items()]
    return f"pretrainax COMMAND --help says more of one of\n\n{text_table(rows, indent='  ')}"


def _docstring(module: str) -> str:
    """Returns that of a command, which is not imported: the list is there at once."""
    spec = importlib.util.find_spec(f"pretrainax.{module}")
    assert spec is not None and spec.origin is not None
    file = pathlib.Path(spec.origin)
    if file.name == "__init__.py":
        file = file.with_name("__main__.py")
    return docstring_of(file)


if __name__ == "__main__":
    main()
