"""PretrainAX: pretrain encoders, encoder-decoders and decoders in JAX."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrainax.inference.load import load

__all__ = ["load"]
__version__ = "0.6.0"


def __getattr__(name: str) -> object:
    """Imports what is used when it is used: `import pretrainax` alone takes no time."""
    if name == "load":
        from pretrainax.inference.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names what can be used, for an editor that completes words."""
    return sorted({*globals(), *__all__})
