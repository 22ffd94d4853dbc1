"""The `pretrainax` program: `pretrainax train --config=…` runs `python -m pretrainax.main --config=…`."""

import importlib.util
import os
import pathlib
import runpy
import sys

from pretrainax.config import UserError, nearest
from pretrainax.config.reference import docstring_of, first_sentence
from pretrainax.reporting.tables import text_table

# command -> module, in the order in which a project uses them; a command has "-" where its module has "_".
MODULES = {"train": "main"} | {
    name.replace("_", "-"): name
    for name in (
        "tokenizer prepare prepare_beam inspect recipe plan profile report evaluate generate predict huggingface "
        "verify_resume zoo"
    ).split()
}


def main() -> None:
    """Runs the module of the command in the first argument; the other arguments are the flags of the command."""
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
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a config file may import files next to it
    runpy.run_module(f"pretrainax.{module}", run_name="__main__", alter_sys=True)


def _commands() -> str:
    """Returns a text that lists the commands with a summary of each, from the first line of the command's docstring."""
    rows = [(name, first_sentence(_docstring(module)).partition(": `")[0]) for name, module in MODULES.items()]
    table = text_table(rows, indent="  ")
    return f"usage: pretrainax COMMAND [flags]\n\n{table}\n\nFlags and examples: pretrainax COMMAND --help"


def _docstring(module: str) -> str:
    """Returns the docstring of a module without importing the module, because the import would take seconds."""
    spec = importlib.util.find_spec(f"pretrainax.{module}")
    assert spec is not None and spec.origin is not None
    file = pathlib.Path(spec.origin)
    if file.name == "__init__.py":
        file = file.with_name("__main__.py")
    return docstring_of(file)


if __name__ == "__main__":
    main()
