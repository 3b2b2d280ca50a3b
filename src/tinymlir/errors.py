# Tangled from notebooks/01_expr.md: edit the chapter, not this file.

# %% 01_expr.md § Errors come first (1)
"""One class for each kind of mistake (chapter 1)."""
from __future__ import annotations


class TinymlirError(Exception):
    """The base of every error that tinymlir raises on purpose."""

    located = False  # does the message begin with the user's line yet?

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"about this error: book/errors/{type(self).__name__}.html")


class ShapeError(TinymlirError, ValueError):
    """Shapes that do not fit together, or a shape that cannot be."""


class AxisError(ShapeError, IndexError):
    """An axis that the array does not have, or the same axis twice."""


class DTypeError(TinymlirError, TypeError):
    """A dtype that an operation, or this compiler, does not take."""


class NumberError(TinymlirError, OverflowError):
    """A Python number that does not fit the dtype it has to take."""


# %% 01_expr.md § Errors come first (2)
class UnsupportedError(TinymlirError, TypeError):
    """A NumPy function, keyword or kind of index that cannot be traced."""


class TracedValueError(TinymlirError, TypeError):
    """Python asked for a number that exists only when the code runs."""


class MissingAttributeError(TinymlirError, AttributeError):
    """An attribute or method of arrays that traced arrays do not have."""


class OutOfRangeError(TinymlirError, IndexError):
    """An index outside the array it looks into."""


class ArgumentError(TinymlirError, TypeError):
    """A call whose arguments do not fit the function that was compiled."""


class TooLargeError(TinymlirError, MemoryError):
    """An array that cannot fit into the memory of this machine."""


class CompileError(TinymlirError, RuntimeError):
    """MLIR or LLVM refused a module. This is our fault, not yours."""


class CheckpointError(TinymlirError, ValueError):
    """A file of a model that is missing, damaged or not supported."""


class GenerationError(TinymlirError, ValueError):
    """A prompt, a length or a logit that no text can be made from."""


# %% 01_expr.md § Errors come first (3)
RAISED_AS = {
    OverflowError: NumberError,
    IndexError: OutOfRangeError,
    TypeError: DTypeError,
    ValueError: ShapeError,
}


def translated(error: Exception, where: object) -> TinymlirError:
    """NumPy's error, or ours, with the user's line in front (once)."""
    if isinstance(error, TinymlirError):
        error.args = error.args if error.located else (f"{where}: {error}",)
        error.located = True
        return error
    both = isinstance(error, ValueError) and isinstance(error, IndexError)
    kind = AxisError if both else next(
        ours for theirs, ours in RAISED_AS.items() if isinstance(error, theirs))
    return translated(kind(str(error)), where)
