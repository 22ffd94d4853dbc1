"""The `pretrainax` program: `pretrainax train --config=…` runs `python -m pretrainax.main --config=…`."""

import importlib.util
import os
import pathlib
import runpy
import sys

import pretrainax
from pretrainax.config import UserError, nearest
from pretrainax.config.reference import docstring_of, first_sentence
from pretrainax.reporting.tables import text_table

# Command -> module, in the order in which a project uses the commands. A "_" in a module name is a "-" in the command.
MODULES = {"train": "main"} | {
    name.replace("_", "-"): name
    for name in (
        "quickstart tokenizer prepare prepare_beam inspect recipe plan profile study ladder report watch evaluate "
        "generate predict huggingface verify_resume zoo doctor completion"
    ).split()
}


def main() -> None:
    """Runs the command that the first argument names, and passes the remaining arguments to it.

    Prints the list of commands for --help, -h or no argument. Exits with status 2 for an unknown command.
    """
    name, arguments = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    texts = {"--help": _commands, "-h": _commands, "--version": _version, "--complete": _words}
    if name in texts:
        print(texts[name]())
        return
    module = MODULES.get(name, name)
    if module not in MODULES.values():
        print(f"pretrainax: no command {name!r}, {nearest(name, MODULES)}", file=sys.stderr)
        sys.exit(UserError.exit_code)
    sys.argv = [name, *arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a config may import modules from here
    runpy.run_module(f"pretrainax.{module}", run_name="__main__", alter_sys=True)


def _commands() -> str:
    """Formats the help text: a usage line, and a table with the first sentence of each command's docstring."""
    rows = [(name, first_sentence(_docstring(module)).partition(": `")[0]) for name, module in MODULES.items()]
    table = text_table(rows, indent="  ")
    return f"usage: pretrainax COMMAND [flags]\n\n{table}\n\nFlags and examples: pretrainax COMMAND --help"


def _version() -> str:
    return f"pretrainax {pretrainax.__version__}"


def _words() -> str:
    """Formats the words that a shell may complete after `pretrainax`; see pretrainax/completion.py."""
    return "\n".join([*MODULES, "--help", "--version"])


def _docstring(module: str) -> str:
    """Reads a module's docstring from its source file, because importing the module would take seconds.

    For a package, reads the docstring of its `__main__.py`.
    """
    spec = importlib.util.find_spec(f"pretrainax.{module}")
    assert spec is not None and spec.origin is not None
    file = pathlib.Path(spec.origin)
    if file.name == "__init__.py":
        file = file.with_name("__main__.py")
    return docstring_of(file)


if __name__ == "__main__":
    main()
