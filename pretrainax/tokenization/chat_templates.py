"""Renders Jinja chat templates. `runtime.confined` runs this module in a separate process; it imports only Jinja.

Templates are untrusted code and run in Jinja's sandbox: they can read the conversation, but cannot modify anything.
The output must depend only on the conversation, so the filter `random` and the function `lipsum` are removed, and
`strftime_now` exists only on request.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

BEGIN, END = "\ufdd0", "\ufdd1"  # marks around rendered answers; these Unicode noncharacters occur in no text
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}>")  # in the default repr of Python objects; differs between processes


def render(template: str, requests: Sequence[Mapping[str, object]], has_clock: bool = False) -> list[str]:
    """Renders a template once for each request; returns the rendered strings.

    Args:
      requests: for each rendering, a mapping from variable names (for example "messages") to values.
      has_clock: whether the template can call `strftime_now(format)`, as in transformers.

    Raises:
      ValueError: the template is invalid, rendering fails, or the output contains an object's memory address.
    """
    compiled = _compile(template, has_clock)
    outputs = []
    for request in requests:
        try:
            output = compiled.render(**request)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as e:
            raise ValueError(f"fails ({type(e).__name__}: {e})") from e
        if (address := _ADDRESS.search(output)) and address[0] not in json.dumps(request):
            raise ValueError("fails: its output has the address of an object, which differs between processes")
        outputs.append(output)
    return outputs


@functools.lru_cache(maxsize=2)
def _compile(template: str, has_clock: bool) -> jinja2.Template:
    """Compiles a template with the same global functions and filters that transformers provides.

    Raises:
      ValueError: the template is invalid.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    if has_clock:
        environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    del environment.filters["random"], environment.globals["lipsum"]
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as e:
        raise ValueError(f"is not a valid Jinja template ({e}): {template[:80]!r}") from e


class _Generation(jinja2.ext.Extension):
    """Jinja extension for {% generation %} … {% endgeneration %} blocks, which mark the answers in a template."""

    tags = {"generation"}  # noqa: RUF012  required by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @staticmethod
    def _marked(caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: Optional[int] = None,
    separators: Optional[tuple[str, str]] = None,
    sort_keys: bool = False,
) -> str:
    """Formats a value as JSON; takes the arguments of transformers' filter `tojson`, in the same order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
