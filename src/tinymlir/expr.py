# Tangled from notebooks/01_expr.md: edit the chapter, not this file.

# %% 01_expr.md § Types (1)
"""The expression graph: types, nodes and NumPy's protocols (chapter 1)."""
from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tinymlir.errors import (
    DTypeError, MissingAttributeError, ShapeError, TracedValueError,
    UnsupportedError, translated)

DTYPES = {np.dtype(long): short for long, short in (
    ("float32", "f32"), ("float64", "f64"), ("int32", "i32"),
    ("int64", "i64"), ("bool", "bool"))}


# %% 01_expr.md § Types (2)
def supported(dtype: Any) -> np.dtype:
    """The dtype in native byte order; DTypeError if there is none for it here."""
    given = np.dtype(dtype)
    native = given.newbyteorder("=") if given.kind in "fib" else None
    if native not in DTYPES:
        known = ", ".join(str(d) for d in DTYPES)
        raise DTypeError(
            f"dtype {given} is not supported; convert the array with "
            f"astype to one of {known}")
    return native


@dataclass(frozen=True)
class TensorType:
    """What is known about a value before it exists."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __post_init__(self) -> None:
        if len(self.shape) > 32:  # as far as np.broadcast_shapes can answer
            raise ShapeError(f"arrays of {len(self.shape)} dimensions are not "
                             f"supported; at most 32")

    def __str__(self) -> str:
        return f"{DTYPES[self.dtype]}[{','.join(map(str, self.shape))}]"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# %% 01_expr.md § One vocabulary of operations (1)
class Op(Enum):
    """Every operation there is, in the groups that passes ask about."""

    INPUT, CONSTANT = auto(), auto()

    ADD, SUB, MUL, DIV, POW = auto(), auto(), auto(), auto(), auto()
    MAXIMUM, MINIMUM = auto(), auto()
    LT, LE, GT, GE, EQ, NE = auto(), auto(), auto(), auto(), auto(), auto()
    AND, OR, XOR, NOT = auto(), auto(), auto(), auto()
    NEG, ABS, EXP, LOG, SQRT, TANH = auto(), auto(), auto(), auto(), auto(), auto()
    WHERE, CAST = auto(), auto()

    SUM, MAX, MIN = auto(), auto(), auto()
    MATMUL = auto()
    RESHAPE, TRANSPOSE, BROADCAST, SLICE = auto(), auto(), auto(), auto()
    CONCATENATE, GATHER, TRIU, TRIL = auto(), auto(), auto(), auto()
    CALL, RESULT = auto(), auto()  # a graph as a function: chapter 6
    UPDATE, ATTEND = auto(), auto()  # rows of a buffer: chapter 10

    def __str__(self) -> str:
        return self.name.lower()


# %% 01_expr.md § One vocabulary of operations (2)
TYPE: dict[Op, Callable[..., TensorType]] = {}
NUMPY: dict[Op, Callable[..., np.ndarray]] = {}


def rule(table: dict[Any, Callable], *keys: Any) -> Callable:
    """Decorator: this function is the rule of these ops in that table."""
    def register(function: Callable) -> Callable:
        table.update(dict.fromkeys(keys, function))
        return function
    return register


# %% 01_expr.md § One vocabulary of operations (3)
UFUNC = {
    Op.ADD: np.add, Op.SUB: np.subtract, Op.MUL: np.multiply,
    Op.DIV: np.true_divide, Op.POW: np.power,
    Op.MAXIMUM: np.maximum, Op.MINIMUM: np.minimum,
    Op.LT: np.less, Op.LE: np.less_equal, Op.GT: np.greater,
    Op.GE: np.greater_equal, Op.EQ: np.equal, Op.NE: np.not_equal,
    Op.AND: np.bitwise_and, Op.OR: np.bitwise_or, Op.XOR: np.bitwise_xor,
    Op.NOT: np.invert, Op.NEG: np.negative, Op.ABS: np.absolute,
    Op.EXP: np.exp, Op.LOG: np.log, Op.SQRT: np.sqrt, Op.TANH: np.tanh,
}
OP_OF = {ufunc: op for op, ufunc in UFUNC.items()}
ELEMENTWISE = frozenset(UFUNC) | {Op.WHERE, Op.CAST}
COMPARISONS = frozenset({Op.LT, Op.LE, Op.GT, Op.GE, Op.EQ, Op.NE})
REDUCTIONS = frozenset({Op.SUM, Op.MAX, Op.MIN})
VIEWS = frozenset({Op.RESHAPE, Op.TRANSPOSE, Op.BROADCAST, Op.SLICE})
NUMPY.update(UFUNC)


# %% 01_expr.md § One vocabulary of operations (4)
@cache
def loop(op: Op, *dtypes: Any) -> tuple[np.dtype, ...]:
    """The dtypes NumPy computes in: one for each operand, then the result's.

    A dtype may be the Python type int or float, for a weak number."""
    return tuple(supported(d) for d in UFUNC[op].resolve_dtypes((*dtypes, None)))


@rule(TYPE, *UFUNC)
def _(*types: TensorType, op: Op) -> TensorType:
    shape = np.broadcast_shapes(*(t.shape for t in types))
    return TensorType(shape, loop(op, *(t.dtype for t in types))[-1])


# %% 01_expr.md § The line that wrote it (1)
OURS = ("numpy.", *(f"tinymlir.{name}." for name in (
    "expr", "protocols", "numpy_api", "indexing", "graph", "pytree", "jit",
    "passes", "updates")))


@dataclass(frozen=True)
class Source:
    """A line of the user's program."""

    file: str
    line: int

    def code(self) -> str:
        import linecache
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        text = self.code()
        scratch = "ipykernel" in self.file or self.file.startswith("<cell")
        name = "cell" if scratch else self.file.rpartition("/")[2]
        return f"{name}, line {self.line}" + (f", in `{text}`" if text else "")


@cache
def is_ours(module: str | None) -> bool:
    return f"{module}.".startswith(OURS)


def user_line() -> Source:
    """The nearest line on the stack that is not ours and not NumPy's."""
    frame = sys._getframe(1)
    while frame.f_back and is_ours(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return Source(frame.f_code.co_filename, frame.f_lineno)


# %% 01_expr.md § A node (1)
INSTEAD = {
    "__bool__": "use np.where(condition, a, b) in place of an if",
    "__setitem__": "build a new array with np.where or np.concatenate",
    "__contains__": "compare with == and reduce with np.max",
    "__float__": "use NumPy's function in place of one of `math`, or pass the "
                 "number as a keyword argument: keywords are static",
    "__array__": "use np.stack to make one array of several, and only the "
                 "functions that chapter 1 lists",
}
KEYWORD = "pass the number as a keyword argument: keywords are static"


def refuse(name: str) -> Callable:
    """A method that says why a traced array cannot answer to this name."""
    def method(self: Expr, *_, **__):
        raise TracedValueError(
            f"{user_line()}: {name} needs the numbers of a traced {self.type}, "
            f"which exist only when the compiled code runs; "
            f"{INSTEAD.get(name, KEYWORD)}")
    return method


# %% 01_expr.md § A node (2)
serials = itertools.count()
METHODS: dict[str, Callable] = {}


@dataclass(frozen=True, eq=False, repr=False)
class Expr(NDArrayOperatorsMixin):
    """One value of a traced program: an op applied to operands.

    It behaves as an array with a shape and a dtype, but without numbers."""

    op: Op
    operands: tuple[Expr, ...]
    type: TensorType
    attrs: dict[str, Any] = field(default_factory=dict)
    source: Source = field(default_factory=user_line)
    serial: int = field(default_factory=lambda: next(serials))

    __hash__ = object.__hash__
    __bool__, __int__, __float__, __complex__, __index__ = map(
        refuse, ("__bool__", "__int__", "__float__", "__complex__", "__index__"))
    __array__, __setitem__, __contains__, __delitem__ = map(
        refuse, ("__array__", "__setitem__", "__contains__", "__delitem__"))

    shape = property(lambda self: self.type.shape)
    dtype = property(lambda self: self.type.dtype)
    ndim = property(lambda self: len(self.type.shape))
    size = property(lambda self: math.prod(self.type.shape))
    T = property(lambda self: self.transpose())

    def __repr__(self) -> str:
        return f"<{self.op}: {self.type}>"

    def __array_ufunc__(self, ufunc, method, *inputs, **keywords):
        return METHODS["__array_ufunc__"](ufunc, method, inputs, keywords)

    def __array_function__(self, function, types, args, keywords):
        return METHODS["__array_function__"](function, args, keywords)

    def __getattr__(self, name):
        return bound_method(self, name)

    def __getitem__(self, key):
        return located(METHODS["__getitem__"], self, key)

    def __len__(self):
        return located(METHODS["__len__"], self)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __copy__(self, memo=None):  # nobody can change it, so a copy is itself
        return self

    __deepcopy__ = __copy__


# %% 01_expr.md § A node (3)
def located(function: Callable, *args: Any, **keywords: Any) -> Any:
    """Call the function; its errors begin with the user's line."""
    try:
        return function(*args, **keywords)
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise translated(error, user_line()) from None


def bound_method(x: Expr, name: str) -> Callable:
    """`x.sum` and other methods of arrays, from the table METHODS."""
    if name in METHODS:
        return partial(located, METHODS[name], x)
    if name.startswith("__"):
        raise AttributeError(name)
    known = ", ".join(k for k in METHODS if k[0] != "_")
    raise MissingAttributeError(
        f"{user_line()}: traced arrays have no attribute `{name}`; they have "
        f"shape, dtype, ndim, size, T, {known}")


# %% 01_expr.md § A node (4)
def make(op: Op, *operands: Expr, **attrs: Any) -> Expr:
    """A new node, with the type that the table of types gives it."""
    extra = {"op": op} if op in UFUNC else {}
    type_ = TYPE[op](*(x.type for x in operands), **attrs, **extra)
    return Expr(op, operands, type_, attrs)


def constant(value: Any, dtype: Any = None) -> Expr:
    """A leaf that holds a copy of the array, made once, at trace time."""
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        raise UnsupportedError(
            f"{type(value).__name__} is a subclass of ndarray with rules of its "
            f"own; pass np.asarray(x)")
    data = np.array(value, dtype, order="C")  # native code reads row after row
    data = data.astype(supported(data.dtype), copy=False)
    data.flags.writeable = False
    type_ = TensorType(data.shape, data.dtype)
    return Expr(Op.CONSTANT, (), type_, {"value": data})


def is_number(node: Expr) -> bool:
    """A constant without a shape: it is written into the code."""
    return node.op is Op.CONSTANT and not node.shape


def variable(shape: Iterable[int], dtype: Any) -> Expr:
    """A leaf that stands for an argument."""
    return Expr(Op.INPUT, (), TensorType(tuple(shape), supported(dtype)))


def as_expr(x: Any) -> Expr:
    """Any operand as a node; arrays and lists become constants."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, (list, tuple)) and any(isinstance(i, Expr) for i in x):
        return METHODS["__stack__"](x)
    return constant(x)
