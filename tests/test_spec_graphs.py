"""Programs of any size, containers of any kind, functions of any sort."""
import collections
import dataclasses
import decimal
import enum
import functools
import operator
import time
import types
from typing import NamedTuple

import numpy as np
import pytest
from spec import battery, difference

from tinymlir import errors, jit
from tinymlir.expr import Op
from tinymlir.graph import evaluate, trace

X = np.arange(6.0).reshape(2, 3)


# ---------------------------------------------------------------- size

def chain(n):
    def run(x):
        for i in range(n):
            x = x * 0.5 + i % 7
        return x
    return run


def test_ten_thousand_operations_in_a_row():
    start = time.monotonic()
    graph, _ = trace(chain(10_000), (X,), {})
    assert len(str(graph).splitlines()) == 20_002 and graph._repr_html_().count("<rect") == 20_001
    np.testing.assert_array_equal(evaluate(graph, X)[0], chain(10_000)(X))
    assert time.monotonic() - start < 30


def growing(n):
    """Operations that do not repeat, all of them in one place."""
    def run(x, y):
        total = x
        for i in range(n):
            total = np.maximum(total - y * float(i), x / (i + 1)) if i % 3 else total + y
        return total
    return run


@pytest.mark.parametrize("function", [chain(2_000), growing(600)], ids=["chain", "growing"])
def test_thousands_of_operations_compile_in_seconds(function):
    args = (X, X + 1)[:function.__code__.co_argcount]
    start = time.monotonic()
    battery({"all": function}, *args)
    assert time.monotonic() - start < 60  # it would be minutes if time grew as a square


def test_a_long_chain_is_cut_so_that_compile_time_grows_with_its_length():
    assert jit(chain(600)).compile(X).stages["fused"].count("linalg.copy") == 1200 // 256


def doubled(x):
    for _ in range(60):
        x = x + x
    return x


def entangled(x):
    for _ in range(60):
        x = np.where(x > 0, x, 1) * np.maximum(x, x.T.T) / (x * x + 1)
    return x


@pytest.mark.parametrize("function", [doubled, entangled])
def test_subexpressions_shared_sixty_deep_are_one_each(function):
    graph, _ = trace(function, (X,), {})
    assert len(graph.nodes) < 1000 and len(str(graph)) < 40_000
    assert graph._repr_html_().count("<rect") < 1000
    battery({"all": function}, X, ulps=60)


def test_row_numbers_in_a_loop_are_wrapped_and_checked_in_every_turn():
    def walk(x, rows):
        for _ in range(4):
            x = np.tanh(x @ x)[rows]
        return x

    x = np.random.default_rng(0).standard_normal((3, 3))
    battery({"all": walk}, x, np.array([-1, 0, -3]), ulps=64)
    for rows in ([0, 1, 3], [0, -4, 1]):
        with pytest.raises(IndexError, match="out of bounds for axis 0 with size 3"):
            jit(walk)(x, np.array(rows))


def test_turns_of_a_loop_that_differ_in_the_order_of_operands_only():
    def crossed(x, w):
        for i in range(4):
            y = np.tanh(x @ w)
            x = y - x if i % 2 else x - y
        return x

    x, w = np.random.default_rng(0).standard_normal((2, 3, 3))
    battery({"all": crossed}, x, w, ulps=256)


def test_five_hundred_arguments_and_five_hundred_results():
    arrays = [np.full(3, float(i)) for i in range(500)]
    ours = jit(lambda *xs: [x + i for i, x in enumerate(xs)])(*arrays)
    assert all((y == 2 * i).all() for i, y in enumerate(ours)) and len(ours) == 500
    tree = jit(lambda xs: {"sum": sum(xs), "first": xs[0], "none": xs[1:1]})(arrays)
    assert (tree["sum"] == sum(arrays)).all() and tree["none"] == []


def test_more_arrays_than_a_call_of_ctypes_can_pass():
    arrays = [np.full(2, float(i)) for i in range(1100)]
    assert (jit(lambda *xs: sum(xs))(*arrays) == sum(arrays)).all()


# ---------------------------------------------------------------- containers

class Pair(NamedTuple):
    a: object
    b: object = 3


@dataclasses.dataclass
class Tree:
    leaf: object
    rest: object = None
    name: str = "tree"


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    leaf: object


CONTAINERS = {
    "nested": lambda x: [(x, [x * 2, {"a": x + 1, "b": (x,)}]), {}],
    "empty": lambda x: [[], {}, (), None],
    "none": lambda x: None, "number": lambda x: 3, "float": lambda x: x.size / 4,
    "text": lambda x: "text",
    "shape": lambda x: x.shape, "dtype": lambda x: x.dtype, "bool": lambda x: True, "scalar":
    lambda x: np.float64(2), "0-d": lambda x: np.sum(x),
    "order": lambda x: {"b": x, "a": x * 2, 3: x},
    "keys": lambda x: {1: x, 2.5: x, (1, "a"): x, None: x, b"k": x}, "empty arrays":
    lambda x: [x[:0], np.zeros((0, 2)), x], "pair": lambda x: [*Pair(x, x + 1)],
    "complex": lambda x: 1j,
    "range": lambda x: range(3), "a row each": lambda x: {i: row for i, row in enumerate(x)},
}


def test_results_of_every_shape():
    battery(CONTAINERS, X)
    for name, function in CONTAINERS.items():
        ours, theirs = jit(function)(X), function(X)
        assert type(ours) is type(theirs) or isinstance(theirs, np.generic), name
        if isinstance(theirs, dict):
            assert list(ours) == list(theirs)
            assert [type(k) for k in ours] == [type(k) for k in theirs]


def test_classes_come_back_as_they_were():
    def function(tree):
        return Tree(tree.leaf * 2, [Pair(tree.rest.leaf), tree.rest]), tree.name

    tree, name = jit(function)(Tree(X, Slots(X + 1), "mine"))
    assert type(tree.rest[0]) is Pair and type(tree.rest[1]) is Slots and name == "mine"
    assert (tree.leaf == X * 2).all() and tree.rest[0].b == 3 and tree.name == "tree"


def test_functions_of_nothing_and_results_of_nothing():
    assert (jit(lambda: np.ones(2))() == 1).all() and jit(lambda: None)() is None
    assert jit(lambda n: n + 1)(2) == 3 and jit(lambda a, b: (a, b))([], {}) == ([], {})
    assert jit(lambda x: x * 2)(np.zeros((0, 3))).shape == (0, 3)
    graph, _ = trace(lambda: 3, (), {})
    assert "<svg" in graph._repr_html_() and str(graph) == "graph <lambda>()\n  return "


@pytest.mark.parametrize("pair", [
    (1, True), (1, 1.0), (0.0, -0.0), (1, np.int64(1)), ("1", b"1"), (1.0, np.float64(1)),
    (True, np.True_)])
def test_dicts_whose_keys_are_equal_but_not_the_same(pair):
    f = jit(lambda d: {k: v * 2 for k, v in d.items()})
    for key in pair:
        assert [repr(k) for k in f({key: X})] == [repr(key)]
    assert len(f.cache) == 2


@pytest.mark.parametrize("pair", [
    (frozenset({1}), frozenset({True})), (0j, complex(0, -0.0)), (range(0, 3, 2), range(0, 4, 2)),
    ({1: 2}, {True: 2}), ((1, (2,)), (1, (2.0,))), (Pair(1, 2), (1, 2)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (-1, -2), (2**61 - 1, 0), (np.float32(1), np.float64(1)), (float("nan"), 0.0)])
def test_statics_that_look_alike(pair):
    f = jit(lambda x, n: (x, repr(n)))
    assert [f(X, n=n)[1] for n in pair] == [repr(n) for n in pair]
    assert len(f.cache) == 2 and f(X, n=pair[0])[1] == repr(pair[0])


def endless():
    trees = [1], {}, [[[2]]], Tree(3)
    trees[0].append(trees[0])
    trees[1]["self"] = trees[1]
    trees[2][0][0].append(trees[2])
    trees[3].rest = [trees[3]]
    return trees


@pytest.mark.parametrize("i", range(4))
def test_containers_that_contain_themselves(i):
    for call in (lambda t: jit(lambda x: 1)(t), lambda t: jit(lambda x, n: 1)(X, n=t),
                 lambda t: jit(lambda x: t)(X)):
        with pytest.raises(errors.ArgumentError, match="contains itself"):
            call(endless()[i])


def test_deep_containers():
    tree = X
    for _ in range(90):
        tree = [tree]
    assert (jit(lambda t: t)(tree)[0][0][0] is not tree) and len(jit(lambda t: t)(tree)) == 1
    for _ in range(2000):
        tree = [tree]
    with pytest.raises(errors.ArgumentError, match="containers deep"):
        jit(lambda t: t)(tree)


STRANGERS = {
    "generator": (x for x in [1]), "set": {1}, "object": object(), "ufunc": np.tanh, "enum":
    enum.Enum("Color", "RED").RED, "OrderedDict": collections.OrderedDict(a=X), "list subclass":
    type("Mine", (list,), {})([X]), "module": types, "decimal": decimal.Decimal(1),
    "iterator": iter([X]),
    "memoryview": memoryview(X), "bytearray": bytearray(b"x"), "slice": slice(1),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_other_objects_are_refused_with_their_path(name):
    thing = STRANGERS[name]
    kind = type(thing).__name__
    with pytest.raises(errors.ArgumentError, match=rf"p\['a'\]\[1\] is a {kind}"):
        jit(lambda p: 1)({"a": [X, thing]})
    with pytest.raises(errors.ArgumentError, match=rf"result\[0\] is a {kind}"):
        jit(lambda x: [thing])(X)


@pytest.mark.parametrize("array", [
    np.ma.array([1.0]), np.ones(2).view(np.matrix), np.rec.array([(1.0,)], dtype=[("a", "f8")]),
    np.array(["a"]),
    np.array([None]), np.zeros(2, "f2"), np.zeros(2, "u4"), np.zeros(2, "c8"), np.zeros(2, "M8[D]"),
    np.zeros(2, np.longdouble), np.zeros(2, "V3"), np.array(["a"], np.dtypes.StringDType()),
    np.str_("a"),
    np.float16(1), np.datetime64("2020-01-01")], ids=lambda a: f"{type(a).__name__} {a.dtype}")
def test_other_arrays_are_refused_wherever_they_come_from(array):
    for call, path in ((lambda: jit(lambda p: 1)([X, array]), r"p\[1\]"),
                       (lambda: jit(lambda x: {"a": array})(X), r"result\['a'\]"),
                       (lambda: jit(lambda x: x + array)(X), None)):
        with pytest.raises(TypeError, match=path):
            call()


# ---------------------------------------------------------------- functions

class Model:
    def __init__(self):
        self.w, self.lookup, self.compile = X, {"a": 1}, "not a method"

    def __call__(self, x):
        return x * self.w

    def method(self, x, y=2):
        return x * y + self.w

    @classmethod
    def of_class(cls, x):
        return x - 1

    @staticmethod
    def static(x):
        return x + 1


def add(a, b, /, c=1, *rest, d=2, **more):
    return a + b * c + sum(rest) + d + more.get("e", 0)


CALLABLES = {
    "np.tanh": (np.tanh, (X,)), "np.add": (np.add, (X, X)), "np.sum": (np.sum, (X,)), "np.matmul":
    (np.matmul, (X, X.T)), "np.where": (np.where, (X > 1, X, 0)), "np.max": (np.max, (X, 1)),
    "abs": (abs, (X,)),
    "operator": (operator.mul, (X, 2)), "len": (len, (X,)), "sum": (sum, (X,)),
    "method": (Model().method, (X,)),
    "method, position": (Model().method, (X, 5)), "class method": (Model.of_class, (X,)),
    "static method":
    (Model.static, (X,)), "object": (Model(), (X,)),
    "partial": (functools.partial(add, X, c=3), (X,)),
    "partial of ufunc": (functools.partial(np.add, 1), (X,)), "class": (Pair, (X, X)),
    "rest": (add, (X, X, 2, X, X)),
    "jitted": (jit(np.tanh), (X,)), "itemgetter": (operator.itemgetter(0), (X,)), "methodcaller":
    (operator.methodcaller("sum", 1), (X,)), "lambda": (lambda x, n=3: x * n, (X,)),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_anything_that_can_be_called_can_be_compiled(name):
    function, args = CALLABLES[name]
    compiled = jit(function)
    for ours, theirs in zip(np.atleast_1d(compiled(*args)), np.atleast_1d(function(*args))):
        assert difference(ours, theirs, ulps=2) is None
    assert str(compiled.compile(*args).graph).startswith("graph ")


@dataclasses.dataclass
class Layer:
    w: np.ndarray

    @jit
    def forward(self, x):
        return x * self.w


def test_methods_can_be_compiled():
    assert (Layer(X).forward(X) == X * X).all() and len(Layer.forward.cache) == 1
    assert (Layer(X + 1).forward(X) == X * (X + 1)).all() and len(Layer.forward.cache) == 1

    class Plain:
        @jit
        def forward(self, x):
            return x

    with pytest.raises(errors.ArgumentError, match="self is a Plain"):
        Plain().forward(X)


def test_keywords_are_static_and_mistakes_are_pythons_own():
    assert (jit(add)(X, X, c=4, d=1, e=5) == add(X, X, c=4, d=1, e=5)).all()
    for args, static in (((X,), {}), ((X, X, 1), {"c": 1}), ((), {})):
        with pytest.raises(TypeError, match="add"):
            jit(add)(*args, **static)


# ---------------------------------------------------------------- leaks

def test_values_that_leak_are_refused_and_leave_nothing_behind():
    leaked = []

    def half_way(x):
        leaked.append(x * 2)
        raise KeyError("half-way")

    f = jit(half_way)
    with pytest.raises(KeyError, match="half-way"):
        f(X)
    assert not f.cache
    for function in (lambda x: x + leaked[0], lambda x: leaked[0], lambda x: [leaked[0][0], x],
                     lambda x: np.where(leaked[0] > 0, x, x),
                     lambda x: np.concatenate([x, leaked[0]])):
        with pytest.raises(errors.TracedValueError, match="traced in another call"):
            jit(function)(X)
    for use in (float, np.asarray, bool, lambda x: np.ones(3) + np.array(x)):
        with pytest.raises(errors.TracedValueError):
            use(leaked[0])


def test_a_traced_value_cannot_enter_another_program_through_a_closure():
    def outer(x):
        return jit(lambda y: y + x)(np.ones(3))

    with pytest.raises(errors.TracedValueError, match="traced in another call"):
        jit(outer)(X)
    inner = jit(lambda y: y * 2)
    assert (jit(lambda x: inner(x) + inner(np.ones(3)))(X) == X * 2 + 2).all()


def test_the_function_sees_its_own_containers_not_the_callers():
    def function(d):
        d["new"] = d["x"] * 2
        return d

    given = {"x": X}
    assert list(jit(function)(given)) == ["x", "new"] and list(given) == ["x"]


def test_errors_in_modules_named_like_numpy_point_at_them():
    module = types.ModuleType("numpy_helpers")
    exec(compile("def f(x):\n    return x @ x\n", "numpy_helpers.py", "exec"), module.__dict__)
    with pytest.raises(errors.ShapeError, match="numpy_helpers.py, line 2"):
        jit(module.f)(X)


def test_unused_work_is_dropped():
    graph, _ = trace(lambda x: (np.exp(x), x + 1)[1], (X,), {})
    assert [n.op for n in graph.nodes if n.op is Op.EXP] == []
