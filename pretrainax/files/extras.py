"""Imports packages that few users need; if one is missing, the error names the extra of setup.cfg that installs it."""

import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType

from pretrainax.files.errors import UserError

_DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # import name -> name on PyPI, if they differ in more than "_" and "-"


def import_extra(module: str, extra: str, use: str) -> ModuleType:
    """Imports a module from a package of an extra.

    Args:
      module: import name, for example "pyarrow.parquet".
      extra: name of the extra in setup.cfg.
      use: the feature that needs the package, as a singular noun, for the error message.

    Raises:
      UserError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise UserError(needs(use, [e.name or module], extra)) from e


def missing(modules: Iterable[str]) -> list[str]:
    """Returns the modules that are not installed, without importing the installed modules."""
    return [module for module in modules if importlib.util.find_spec(module) is None]


def needs(use: str, modules: Iterable[str], extra: str) -> str:
    """Formats the error message for missing modules: "rouge needs the package rouge-score: pip install '…'"."""
    names = dict.fromkeys(module.partition(".")[0] for module in modules)
    packages = [_DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in names]
    noun = "package" if len(packages) == 1 else "packages"
    return f"{use} needs the {noun} {' and '.join(packages)}: pip install 'pretrainax[{extra}]'"
