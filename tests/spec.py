"""NumPy is the specification: what the tests/test_spec_*.py compare with."""
import warnings

import numpy as np

from tinymlir import errors, jit
from tinymlir.graph import evaluate, trace
from tinymlir.pytree import flatten

BUILT_IN = (TypeError, ValueError, IndexError, OverflowError, AttributeError)
GROUP = 50  # cases that are compiled as one program


def outcome(function, args, warns=False):
    """(True, result) or (False, exception). Only NumPy may warn, of means of nothing."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore" if warns else "error", RuntimeWarning)
        try:
            return True, function(*args)
        except BUILT_IN as error:
            return False, error


def interpreted(function):
    """The function as the graph's interpreter runs it."""
    def run(*args):
        graph, structure = trace(function, args, {})
        arrays = [leaf for arg in args for _, leaf in flatten(arg, "x")[0]]
        return structure.fill(iter(evaluate(graph, *arrays)))
    return run


def difference(ours, theirs, ulps=0, signs=True):
    """What is wrong with our result, or None. Shapes and dtypes have to be equal."""
    if not isinstance(theirs, (np.ndarray, np.generic)):
        wrong = type(ours) is not type(theirs) or ours != theirs
        return f"{ours!r} is not {theirs!r}" if wrong else None
    a, b = np.asarray(ours), np.asarray(theirs)
    if (a.dtype, a.shape) != (b.dtype.newbyteorder("="), b.shape):
        return f"{a.dtype}{a.shape} is not {b.dtype}{b.shape}"
    if a.dtype.kind != "f":
        good = a == b
    else:
        info = np.finfo(a.dtype)
        good = (a == b) | np.isclose(a, b, rtol=ulps * info.eps, equal_nan=True,
                                     atol=ulps * info.smallest_subnormal)
        if signs:
            good &= (np.signbit(a) == np.signbit(b)) | np.isnan(b)
    return None if good.all() else f"{a[~good][:4]} is not {b[~good][:4]}"


def leaves(tree):
    """All leaves of containers, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    return ([leaf for part in tree for leaf in leaves(part)]
            if isinstance(tree, (list, tuple)) else [tree])


def wrong(function, theirs, args, ulps, signs, engine):
    """What is wrong with a function run by an engine, for results NumPy has."""
    ok, ours = outcome(engine(function), args)
    if not ok:
        return f"{type(ours).__name__}: {ours}"
    ours, theirs = leaves(ours), leaves(theirs)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    found = [difference(a, b, ulps, signs) for a, b in zip(ours, theirs)]
    return next(filter(None, found), None)


def wrong_error(function, theirs, args):
    """We must refuse too: with one of our errors, of the built-in class of NumPy's."""
    ok, ours = outcome(interpreted(function), args)
    if ok:
        return f"no error, where NumPy says {type(theirs).__name__}: {theirs}"
    if str(ours) == str(theirs) or "returned NotImplemented" in str(ours):
        return None  # it is Python or NumPy that refused
    kinds = tuple(kind for kind in BUILT_IN if isinstance(theirs, kind))
    if not isinstance(ours, errors.TinymlirError) or not isinstance(ours, kinds):
        return f"{type(ours).__name__}: {ours}, not {type(theirs).__name__}: {theirs}"
    return None


def battery(cases, *args, ulps=0, signs=True, compiled=True):
    """Every case (name -> function of args) does what NumPy does, in value or error."""
    right, failed = {}, {}
    for name, function in cases.items():
        ok, theirs = outcome(function, args, warns=True)
        if ok:
            right[name] = theirs
        failed[name] = (wrong(function, theirs, args, ulps, signs, interpreted) if ok
                        else wrong_error(function, theirs, args))
    names = [name for name in right if not failed[name]]
    for i in range(0, len(names) if compiled else 0, GROUP):
        some = names[i:i + GROUP]
        ok, ours = outcome(jit(lambda *xs, some=some: [cases[n](*xs) for n in some]), args)
        for n, result in zip(some, ours if ok else [ours] * len(some)):
            pairs = zip(leaves(result), leaves(right[n]))
            found = [difference(a, b, ulps, signs) for a, b in pairs]
            failed[n] = next(filter(None, found), None) if ok else repr(ours)
    failed = {name: text for name, text in failed.items() if text}
    lines = [f"{name}: {text}" for name, text in list(failed.items())[:12]]
    assert not failed, f"{len(failed)} of {len(cases)}:\n" + "\n".join(lines)
