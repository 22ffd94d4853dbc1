"""Prints a script that completes commands in a shell: `source <(pretrainax completion bash)`.

    bash    add to ~/.bashrc:                    source <(pretrainax completion bash)
    zsh     add to ~/.zshrc, after compinit:     source <(pretrainax completion zsh)
    fish    add to ~/.config/fish/config.fish:   pretrainax completion fish | source

Tab then completes commands, their flags, the values of flags with few values, the names of configs after --config=, and
the fields that every config has, such as --config.train.steps. Other values are completed as files.
"""

import dataclasses
import sys
import typing
from collections.abc import Iterator

from absl import flags

from pretrainax import cli
from pretrainax.config import Choice, Experiment
from pretrainax.config.config_file import config_names

# Each script calls `pretrainax COMMAND --complete`, which prints one word per line, and offers the words that begin
# with the word at the cursor. Words that end in "=" get no space.
SCRIPTS = {
    # Readline splits a word at "=" and ":" and replaces only the last part, so the parts before it are removed.
    "bash": """\
_pretrainax() {
    local line=${COMP_LINE:0:COMP_POINT} part=${COMP_WORDS[COMP_CWORD]} command=
    local word=${line##*[[:space:]]}
    [[ $part == [=:] ]] && part=
    [[ $COMP_CWORD -gt 1 ]] && command=${COMP_WORDS[1]}
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W "$("$1" $command --complete 2>/dev/null)" -- "$word"))
    COMPREPLY=("${COMPREPLY[@]#"${word%"$part"}"}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
}
complete -o default -F _pretrainax pretrainax
""",
    "zsh": """\
_pretrainax() {
    local command= words_of_command
    (( CURRENT > 2 )) && command=${words[2]}
    words_of_command=(${(f)"$(${words[1]} $command --complete 2>/dev/null)"})
    compadd -S '' -- ${(M)words_of_command:#*=}
    compadd -- ${words_of_command:#*=}
    compset -P '*='
    _files
}
compdef _pretrainax pretrainax
""",
    "fish": """\
function __pretrainax_words
    set -l words (commandline -opc)
    $words[1] $words[2] --complete 2>/dev/null
end
complete -c pretrainax -a '(__pretrainax_words)'
""",
}


def flag_words(has_config: bool) -> Iterator[str]:
    """Yields the words that a shell may complete after the running command: its flags, and the fields of its config."""
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        if flag.boolean:
            yield f"--{flag.name}"
        else:
            values = config_names() if flag.name == "config" else getattr(flag.parser, "enum_values", ())
            yield from (f"--{flag.name}={value}" for value in values or [""])
    yield from _fields(Experiment, "config") if has_config else ()


def _fields(section: type, path: str) -> Iterator[str]:
    """Yields a flag for each field of a config section and of the sections in it."""
    for name, hint in typing.get_type_hints(section).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and not issubclass(hint, Choice):
            yield from _fields(hint, f"{path}.{name}")
        else:
            yield f"--{path}.{name}="


def main(shell: str) -> int:
    """Prints the script for a shell. Returns the exit code."""
    print(SCRIPTS[shell], end="")
    return 0


if __name__ == "__main__":
    cli.run(main, commands=dict.fromkeys(SCRIPTS, ()), run_flags=())
