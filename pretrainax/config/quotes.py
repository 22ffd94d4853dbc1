"""Parses the sources of a ledger: a file of a public repository, a quote from it, and the value that the quote gives.

A source is "owner/name@commit:path", and may continue with a remark after a comma. The quote contains the characters of
this file that give the value, for example "learning_rate: 4.0e-4".
"""

import ast
import math
import operator
import re
from typing import NamedTuple, Optional

from pretrainax.files.errors import UserError

_SOURCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{40}):(?P<path>[^\s,;]*[^\s,;:])")
# A number with or without thousands separators ("10,000", "10_000"), which is not part of a word ("beta1", "v1.0").
_NUMBER = re.compile(
    r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:_\d+)*)?(?:(?<=\d)\.\d*|\.\d+|(?<=\d))(?:[eE][+-]?\d+)?"
)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


class ReleasedFile(NamedTuple):
    """A file of a public repository at a commit."""

    repository: str  # "google-research/bert"
    commit: str  # 40 hexadecimal digits
    path: str  # path in the repository

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:7]}:{self.path}"


def released_file(source: str) -> Optional[ReleasedFile]:
    """Returns the file that a ledger's source names, or None if the source names no file."""
    match = _SOURCE.match(source)
    return ReleasedFile(**match.groupdict()) if match else None


def numbers(quote: str) -> list[float]:
    """Returns the numbers in a quote, in order. A digit inside a word, as in "beta1", is not a number."""
    return [float(re.sub("[,_]", "", match[0])) for match in _NUMBER.finditer(quote)]


def quoted_number(quote: str, expression: str = "") -> float:
    """Computes the number that a quote gives.

    Args:
      quote: the quote, for example "t_warmup: 8388608000".
      expression: a formula of + - * / ** and parentheses, for example "a / 2_097_152", in which a, b, c … are the
        numbers of the quote. "" means the only number of the quote.

    Raises:
      UserError: the expression is invalid, or "" and the quote does not have exactly one number.
    """
    found = numbers(quote)
    if not expression:
        if len(found) != 1:
            raise UserError(f"the quote {quote!r} has {len(found)} numbers: add an expression, such as 'a'")
        return found[0]
    try:
        result = _evaluate(ast.parse(expression, mode="eval").body, dict(zip("abcdefghij", found, strict=False)))
    except (SyntaxError, ValueError, ArithmeticError) as e:
        raise UserError(
            f"the expression {expression!r} is invalid ({e}): it may contain numbers, + - * / ** ( ), and the letters "
            f"of the {len(found)} numbers of the quote"
        ) from e
    return result


def _evaluate(node: ast.AST, variables: dict[str, float]) -> float:
    """Evaluates arithmetic on numbers and variables; raises ValueError for everything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id in variables:
        return variables[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, variables)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_evaluate(node.left, variables), _evaluate(node.right, variables))
        if isinstance(result, float):
            return result
    raise ValueError(f"{ast.unparse(node)} is not available")


def is_compared(value: object, expression: str = "") -> bool:
    """Returns True if a value is compared with a number in its quote; False for words and constant expressions."""
    numeric = isinstance(value, (list, tuple, int, float)) and not isinstance(value, bool)
    return numeric and (not expression or any(map(str.isalpha, re.sub(r"\d[eE]", "", expression))))


def mismatch(value: object, quote: str, expression: str = "") -> str:
    """Compares a ledger's value with its quote; returns the difference, or "" if they agree.

    Numbers must equal the number that the quote gives, to 9 digits. The expression for a list of numbers has a formula
    for each number, separated by commas. Other values (class names) are not compared.
    """
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    expected = [x for x in items if isinstance(x, (int, float)) and not isinstance(x, bool)]
    if len(expected) < len(items):
        return ""
    try:
        found = [quoted_number(quote, formula.strip()) for formula in expression.split(",")]
    except UserError as e:
        return str(e)
    if len(found) == len(expected) and all(map(_are_close, found, expected)):
        return ""
    return f"{', '.join(f'{x:.10g}' for x in found)} in the quote"


def _are_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9)
