"""Repeated blocks become calls, and nothing else changes (chapter 6)."""
import numpy as np
import pytest

from tinymlir import jit

M = np.array([[1.0, 2.0], [3.0, -1.0]])
REPEATS = {
    "x@x, (x@x)@x": lambda x: (y := x @ x, y @ x),
    "x@x, x@(x@x)": lambda x: (y := x @ x, x @ y),
    "squares": lambda x: (y := x @ x, z := y @ y, z @ z),
    "fibonacci": lambda x: (a := x @ x, b := a @ x, c := b @ a, c @ b),
    "swapped": lambda x: (y := x @ x.T, y.T @ x, x @ (y @ x)),
}


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_blocks_keep_their_operands_apart(name):
    for ours, theirs in zip(jit(REPEATS[name])(M), REPEATS[name](M)):
        np.testing.assert_array_equal(ours, theirs)


def graph_of(function, *args):
    from tinymlir.graph import trace
    from tinymlir.rewrites import improve
    return improve(trace(function, args, {})[0])


def calls(graph):
    return sum(str(node.op) == "call" for node in graph.nodes)


def layers(x, weights, last=1.0):
    for i, w in enumerate(weights):
        x = np.tanh(x @ w) * (last if i == len(weights) - 1 else 1.0) + x
    return x


@pytest.mark.parametrize("n", [1, 2, 3, 12])
def test_layers_of_a_loop_become_calls(n):
    weights = [np.random.default_rng(i).standard_normal((2, 2)) for i in range(n)]
    graph = graph_of(layers, M, weights)
    assert calls(graph) == (n if n > 1 else 0)
    np.testing.assert_allclose(jit(layers)(M, weights), layers(M, weights), rtol=1e-14)


def test_a_layer_that_differs_stays_apart():
    weights = [np.eye(2)] * 6
    graph = graph_of(lambda x, w: layers(x, w, last=3.0), M, weights)
    assert calls(graph) == 5


def test_every_layer_may_be_a_result():
    def all_layers(x, weights):
        seen = [x]
        for w in weights:
            seen.append(np.maximum(seen[-1] @ w, 0) + seen[-1])
        return seen[1:]

    weights = [np.random.default_rng(i).standard_normal((2, 2)) for i in range(5)]
    for ours, theirs in zip(jit(all_layers)(M, weights), all_layers(M, weights)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-14)
    assert calls(graph_of(all_layers, M, weights)) == 5


def test_a_gather_in_a_loop_is_still_checked():
    def walk(x, table, ids):
        for i in range(4):
            x = x @ table[ids + i]
        return x

    table, ids = np.random.default_rng(0).standard_normal((5, 2, 2)), np.array(1)
    np.testing.assert_allclose(jit(walk)(M, table, ids), walk(M, table, ids), rtol=1e-13)
    with pytest.raises(IndexError, match="index 5"):
        jit(walk)(M, table, np.array(2))


@pytest.mark.parametrize("rows", [0, -1, [2, 0], [[1], [2]], [0, 1, 2, 0, 1]])
def test_rows_of_a_product_are_a_product_of_rows(rows):
    a, b = (np.random.default_rng(i).standard_normal((3, 3)) for i in (1, 2))
    f = jit(lambda a, b, rows: (a @ b)[rows])
    np.testing.assert_allclose(f(a, b, np.array(rows)), (a @ b)[rows], rtol=1e-13)
    with pytest.raises(IndexError, match="test_outline.py.*index 3"):
        f(a, b, np.full(np.shape(rows), 3))
    small = np.size(rows) < 3
    graph = graph_of(lambda a, b, rows: (a @ b)[rows], a, b, np.array(rows))
    products = [node for node in graph.nodes if str(node.op) == "matmul"]
    assert [node.shape[0] for node in products] == [np.size(rows) if small else 3]
