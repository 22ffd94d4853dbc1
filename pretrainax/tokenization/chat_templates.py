"""Renders chat templates in Jinja, in a process of its own (`runtime.confined`): imports Jinja alone.

A template comes from others. It runs in Jinja's sandbox: it sees the conversation, and changes nothing. The text
follows from the conversation alone, so there is no `random` and no `lipsum`.
"""

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

BEGIN, END = "\ufdd0", "\ufdd1"  # around an answer while it is rendered: no characters, in no text
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}>")  # Python's text of an object, another one in each process


def render(template: str, requests: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns a text for each request: the variables of the template by name. Raises ValueError where it fails."""
    found = _parsed(template)
    texts = []
    for request in requests:
        try:
            text = found.render(**request)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as e:
            raise ValueError(f"fails ({type(e).__name__}: {e})") from e
        if (address := _ADDRESS.search(text)) and address[0] not in json.dumps(request):
            raise ValueError("fails: it writes the address of an object, which is another one in each process")
        texts.append(text)
    return texts


@functools.lru_cache(maxsize=2)
def _parsed(template: str) -> jinja2.Template:
    """Returns a template with what transformers gives to all."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    del environment.filters["random"], environment.globals["lipsum"]
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as e:
        raise ValueError(f"is no Jinja template ({e}): {template[:80]!r}") from e


class _Generation(jinja2.ext.Extension):
    """The block {% generation %} … {% endgeneration %}, by which a template says what answers are."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @staticmethod
    def _marked(caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END


def _to_json(value: object, indent: Optional[int] = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
