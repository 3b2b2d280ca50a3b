"""The driver layer on a stand-in device: memory, copies, graphs, errors. No GPU is needed."""
import gc
import os
import re
import shutil
import subprocess
import sys
import threading
import weakref
from contextlib import ExitStack

import numpy as np
import pytest

from by_hand import doubling, numbers
from tinymlir import jit
from tinymlir.cuda import settings
from tinymlir.devarray import DeviceArray, borrow, from_dlpack, put
from tinymlir.device import available, device, frozen, rounded, use
from tinymlir.driver import (
    DeviceError, DeviceMemoryError, Driver, Mark, Module, Recording, check_chip)
from tinymlir.errors import TinymlirError, UnsupportedError
from tinymlir.launcher import GRAPH_FROM
from tinymlir.standin import StandIn


@pytest.fixture
def stand_in():
    """A way to make a stand-in the device of this process, until the test ends."""
    def make(**options):
        api = StandIn(**options)
        use(api)
        return api
    yield make
    use()
    settings.find = None
    gc.collect()


def double(count, **options):
    """`lambda x: x * 2`, compiled by hand."""
    settings.find = lambda graph: doubling(count, **options)
    return jit(lambda x: x * 2, target="gpu")


# ---------------------------------------------------------------- arrays in and out

@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000])
def test_host_arrays_in_host_arrays_out(stand_in, count):
    stand_in()
    x = numbers(count)
    y = double(count)(x)
    assert type(y) is np.ndarray and y.dtype == np.float32
    np.testing.assert_array_equal(y, x * 2)


def test_results_on_the_device_feed_the_next_call_without_a_copy(stand_in):
    api = stand_in()
    f, x = double(100), numbers(100)
    a = f(put(x))
    before = dict(api.calls)
    b = f(f(a))
    assert isinstance(b, DeviceArray)
    for name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"):
        assert api.calls.get(name) == before.get(name), name
    np.testing.assert_array_equal(b.numpy(), x * 8)
    np.testing.assert_array_equal(np.asarray(a), x * 2)


def test_an_array_that_changes_is_uploaded_at_each_call(stand_in):
    stand_in()
    f, x = double(50), numbers(50)
    first = f(x)
    x += 1
    np.testing.assert_array_equal(f(x), x * 2)
    assert not np.array_equal(first, x * 2)
    x.flags.writeable = False
    f(x)
    x.flags.writeable = True
    x += 1
    x.flags.writeable = False
    np.testing.assert_array_equal(f(x), x * 2)


def test_a_frozen_array_is_uploaded_once_and_forgotten_when_it_dies(stand_in):
    api = stand_in()
    f = double(50)
    x = np.frombuffer(numbers(50).tobytes(), np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(f(x), x * 2)
    assert api.calls["cuMemcpyHtoDAsync"] == 1
    assert len(device().uploads) == 1
    del x
    gc.collect()
    assert not device().uploads
    y = np.frombuffer(numbers(50, seed=1).tobytes(), np.float32)
    np.testing.assert_array_equal(f(y), y * 2)


def test_what_is_frozen(tmp_path):
    path = tmp_path / "numbers"
    numbers(16).tofile(path)
    assert frozen(np.memmap(path, np.float32, "r"))
    assert frozen(np.asarray(np.memmap(path, np.float32, "r"))[4:].view(np.int32))
    assert not frozen(np.memmap(path, np.float32, "r+"))
    assert not frozen(np.memmap(path, np.float32, "c"))
    owner = numbers(16)
    view = owner[:]
    view.flags.writeable = False
    assert not frozen(view)
    owner.flags.writeable = False
    assert not frozen(view)
    assert not frozen(np.frombuffer(memoryview(bytearray(8)).toreadonly(), np.uint8))
    assert frozen(np.frombuffer(b"12345678", np.uint8))


def test_an_array_on_the_device_is_not_compared(stand_in):
    stand_in()
    x = put(np.zeros(1))
    for attempt in (lambda: bool(x), lambda: x == put(np.zeros(1)), lambda: x != 0):
        with pytest.raises(UnsupportedError, match="on the GPU cannot be compared"):
            attempt()
    assert len({x, x}) == 1


def test_slices_of_rows_are_the_same_memory(stand_in):
    stand_in()
    x = numbers(60).reshape(20, 3)
    there = put(x)
    for key in (slice(3, 9), slice(-4, None), slice(None), slice(5, 5), slice(30, 40)):
        part = there[key]
        assert part.owner is there.owner
        np.testing.assert_array_equal(part.numpy(), x[key])
    with pytest.raises(TypeError):
        there[3]
    with pytest.raises(TypeError):
        there[::2]


def test_a_slice_that_starts_anywhere_is_an_argument(stand_in):
    stand_in()
    x = numbers(60)
    f = double(50)
    np.testing.assert_array_equal(f(put(x)[7:57]).numpy(), x[7:57] * 2)


def test_numpy_refuses_to_compute_with_it(stand_in):
    stand_in()
    x = put(numbers(4))
    for wrong in (lambda: np.add(x, 1), lambda: x + 1, lambda: np.sum(x), lambda: 1 * x):
        with pytest.raises(TypeError):
            wrong()
    assert np.asarray(x, np.float64).dtype == np.float64
    with pytest.raises(TypeError):
        np.array(x, copy=False)
    assert repr(x) == "DeviceArray(shape=(4,), dtype=float32)"
    assert (len(x), x.ndim, x.size, x.nbytes) == (4, 1, 4, 16)


# ---------------------------------------------------------------- memory

def test_sizes():
    for n in [0, 1, 511, 512, 513, *(np.logspace(1, 12, 300).astype(int)).tolist()]:
        size = rounded(n)
        assert size >= n and size % 512 == 0 and size <= max(n * 9 / 8, n + 512)


def test_memory_is_used_again(stand_in):
    api = stand_in()
    f, x = double(1000), numbers(1000)
    f(x)
    before = api.calls["cuMemAlloc"]
    for _ in range(20):
        f(x)
    assert api.calls["cuMemAlloc"] == before
    assert "cuMemFree" not in api.calls


def test_memory_in_use_is_not_used_again(stand_in):
    stand_in()
    f = double(1000)
    inputs = [numbers(1000, seed) for seed in range(12)]
    kept = [f(put(x)) for x in inputs]
    for x, y in zip(inputs, kept):
        np.testing.assert_array_equal(y.numpy(), x * 2)
    assert len({y.address for y in kept}) == len(kept)


def test_out_of_memory_empties_the_pool_and_tries_again(stand_in):
    api = stand_in(memory=1 << 20)
    a = put(np.zeros(150_000, np.float32))
    del a
    put(np.zeros(200_000, np.float32))  # does not fit beside the first one
    assert api.calls["cuMemFree"] == 1


def test_out_of_memory_is_said_with_numbers(stand_in):
    stand_in(memory=1 << 20)
    kept = put(np.zeros(1000, np.float32))
    with pytest.raises(DeviceMemoryError, match=r"4,000,000 bytes asked for, 1,04\d,\d+ of "
                                                r"1,048,576 are free"):
        put(np.zeros(1_000_000, np.float32))
    np.testing.assert_array_equal(kept.numpy(), np.zeros(1000))
    assert issubclass(DeviceMemoryError, MemoryError)


@pytest.mark.parametrize("nth", range(1, 6))
def test_an_allocation_that_fails_once_is_tried_again(stand_in, nth):
    stand_in(fail={"cuMemAlloc": (nth, "OUT_OF_MEMORY")})
    f = double(500)
    for seed in range(4):
        x = numbers(500, seed)
        np.testing.assert_array_equal(f(x), x * 2)


def test_other_errors_of_an_allocation_are_not_out_of_memory(stand_in):
    stand_in(fail={"cuMemAlloc": (2, "NOT_FOUND"), "cuMemFree": (1, "NOT_FOUND")})
    put(numbers(5))
    assert message(lambda: put(numbers(5000))) == "cuMemAlloc: not found"


# ---------------------------------------------------------------- CUDA graphs

def test_a_long_plan_is_a_graph_from_the_second_call_on(stand_in):
    api = stand_in()
    f = double(70, launches=GRAPH_FROM)
    for seed in range(6):
        x = numbers(70, seed)
        np.testing.assert_array_equal(f(x), x * 2)
    assert api.calls["cuGraphInstantiate"] == 1
    assert api.calls["cuGraphLaunch"] == 5
    assert api.calls["cuLaunchKernel"] == 2 * GRAPH_FROM  # the first call and the drawing


def test_results_of_a_graph_are_fresh_memory(stand_in):
    stand_in()
    f = double(70, launches=GRAPH_FROM)
    inputs = [numbers(70, seed) for seed in range(4)]
    there = [put(x) for x in inputs]
    for _ in range(3):
        made = [f(x) for x in there]
    for x, y in zip(inputs, made):
        np.testing.assert_array_equal(y.numpy(), x * 2)


def test_other_addresses_are_other_graphs(stand_in):
    api = stand_in()
    f = double(70, launches=GRAPH_FROM)
    a, b = put(numbers(70)), put(numbers(70, 1))
    for x in (a, a, b, b, a, b):
        y = f(x)
        np.testing.assert_array_equal(y.numpy(), x.numpy() * 2)
    assert api.calls["cuGraphInstantiate"] == 2
    many = [put(numbers(70, seed)) for seed in range(10)]
    for x in many:
        f(x)
        f(x)
    del f
    gc.collect()
    put(numbers(3))
    destroyed = api.calls["cuGraphExecDestroy"]
    assert destroyed == api.calls["cuGraphInstantiate"] == 12
    assert api.calls["cuModuleUnload"] == 1
    assert not [h for h in api.handles.values() if isinstance(h, tuple)]


def test_a_capture_that_fails_leaves_the_stream_usable(stand_in):
    api = stand_in()
    home = device()
    with home.current(), pytest.raises(ZeroDivisionError), Recording(home.stream):
        raise ZeroDivisionError
    assert api.drawing is None
    np.testing.assert_array_equal(double(40)(numbers(40)), numbers(40) * 2)


# ---------------------------------------------------------------- order

def test_work_waits_until_somebody_looks(stand_in):
    """So the tests below notice a missing wait: the stand-in is as lazy as a GPU may be."""
    api = stand_in()
    y = double(40)(put(numbers(40)))
    assert api.queue
    np.testing.assert_array_equal(y.numpy(), numbers(40) * 2)
    assert not api.queue


def test_the_host_may_change_an_array_as_soon_as_a_call_returns(stand_in):
    stand_in()
    f, x = double(40), numbers(40)
    there = put(x)
    y = f(there)
    x[:] = 0
    np.testing.assert_array_equal(y.numpy(), numbers(40) * 2)


def test_marks_measure(stand_in):
    stand_in()
    f, x = double(40), put(numbers(40))
    f(x)
    home = device()
    with home.current():
        begin = Mark(home.stream)
        for _ in range(7):
            f(x)
        end = Mark(home.stream)
        assert end - begin >= 7
        begin.forget()


# ---------------------------------------------------------------- errors

def message(function, kind=DeviceError):
    with pytest.raises(kind) as told:
        function()
    assert "\n" not in str(told.value)
    return str(told.value)


def test_no_device(stand_in):
    assert "sees no device" in message(lambda: stand_in(devices=0))


def test_chip_older_than_the_kernel(stand_in):
    stand_in(capability=(8, 0))
    told = message(lambda: double(5, chip="sm_90", version="8.0")(numbers(5)))
    assert told == ("the kernels are for sm_90, and stand-in is sm_80; compile them with "
                    "--chip sm_80")


def test_chips_that_are_only_themselves(stand_in):
    stand_in(capability=(9, 0))
    check_chip("sm_90a", device().properties)
    check_chip("sm_80", device().properties)
    for chip in ("sm_80a", "sm_100", "sm_100a", "sm_120"):
        message(lambda chip=chip: check_chip(chip, device().properties))
    message(lambda: check_chip("gfx90a", device().properties))


def test_driver_older_than_the_ptx(stand_in):
    stand_in(cuda=(12, 1))
    told = message(lambda: double(5, version="8.4")(numbers(5)))
    assert told == ("the kernels are PTX 8.4, which needs CUDA 12.4, and the driver is of "
                    "CUDA 12.1; update the NVIDIA driver")


def test_what_the_drivers_compiler_says_is_in_the_message(stand_in):
    stand_in()
    home = device()
    with home.current():
        told = message(lambda: Module(home.driver, ".version 8.0\n.target sm_100\n"))
        assert "invalid ptx" in told and "ptxas fatal: SM version" in told
        told = message(lambda: Module(home.driver, ".version 99.0\n.target sm_80\n"))
        assert "unsupported ptx version" in told


def test_an_address_outside_is_sticky(stand_in):
    stand_in()
    f = double(64, reach=100_000)
    x = put(numbers(64))
    y = f(x)  # nobody has looked yet
    told = message(lambda: y.numpy())
    assert "a kernel has failed (illegal address)" in told and "innocent" in told
    for innocent in (lambda: x.numpy(), lambda: put(numbers(3)), lambda: f(x)):
        assert "takes no more work from this process" in message(innocent)


def test_every_function_may_fail_and_says_so(stand_in):
    api = stand_in()
    f = double(40, launches=GRAPH_FROM)
    for _ in range(3):
        f(put(numbers(40)))
    for name in api.calls:
        use()

        def all_of_it(name=name):
            stand_in(fail={name: (1, "INVALID_VALUE")})
            g = double(40, launches=GRAPH_FROM)
            x = put(numbers(40))
            for _ in range(3):
                y = g(x)
            np.testing.assert_array_equal(y.numpy(), numbers(40) * 2)
            del g, y
            gc.collect()
            put(numbers(4))
            device().pool.trim()
        assert "invalid value" in message(all_of_it), name


def scenario():
    """Something of everything; nothing of it is left when it returns or raises."""
    f, short, x = double(40, launches=GRAPH_FROM), double(40), put(numbers(40))
    settings.find = lambda graph: doubling(40, launches=GRAPH_FROM)
    for y in (x, x, x, numbers(40), x[10:10], Foreign(numbers(40)), from_dlpack(x)):
        if len(y.shape) and y.shape[0]:
            np.testing.assert_array_equal(np.asarray(f(y)), numbers(40) * 2)
    settings.find = lambda graph: doubling(40)
    short(numbers(40))
    home = device()
    with home.current(), ExitStack() as stack:
        for _ in range(2):
            stack.callback(Mark(home.stream).forget)


DESTROY = {"cuMemFree", "cuModuleUnload", "cuGraphExecDestroy", "cuGraphDestroy",
           "cuEventDestroy"}  # what they refuse to take back stays
CAPTURE_GOES_ON = {"cuStreamEndCapture"}  # if it is made to fail here; a driver ends it


def test_nothing_leaks_whatever_fails(stand_in):
    api = stand_in()
    scenario()
    counts = {name: n for name, n in api.calls.items()
              if name not in DESTROY | CAPTURE_GOES_ON}
    for name, count in counts.items():
        for nth in {1, 2, 3, count // 2, count - 1, count} & set(range(1, count + 1)):
            use()
            gc.collect()
            api, failed = None, False
            try:
                api = stand_in(fail={name: (nth, "INVALID_VALUE")})
                scenario()
            except (DeviceError, AssertionError) as error:
                failed = True
                assert "invalid value" in str(error) or "not that of" in str(error), (name, nth)
                error.__traceback__ = None
            if api is None or not failed:
                continue
            gc.collect()
            home = device()
            with home.current():
                home.pool.trim()
            assert api.drawing is None and not api.memory.blocks, (name, nth)
            left = [h for h in api.handles.values()
                    if h != "stream" and not (isinstance(h, dict) and "kernel" in h)]
            assert not left and not api.here.stack, (name, nth, left)


@pytest.mark.parametrize("wrong", [
    dict(grid=(0, 1, 1)), dict(block=(2048, 1, 1)), dict(block=(33, 1, 1)),
    dict(shared=200 << 10)])
def test_launches_that_no_device_takes(stand_in, wrong):
    from dataclasses import replace
    stand_in()
    plan = doubling(20)
    plan = replace(plan, steps=(replace(plan.steps[0], **wrong),))
    settings.find = lambda graph: plan
    assert "invalid value" in message(lambda: jit(lambda x: x * 2, target="gpu")(numbers(20)))


@pytest.mark.parametrize("wrong", ["argument", "result", "pointer", "offset"])
def test_plans_that_do_not_fit_their_graph(stand_in, wrong):
    from dataclasses import replace

    from tinymlir.plan import Pointer
    stand_in()
    plan, other = doubling(20), doubling(21)
    buffers = list(plan.buffers)
    steps = plan.steps
    if wrong in ("argument", "result"):
        place = ("argument", "result").index(wrong)
        buffers[place] = other.buffers[place]
    else:
        bad = Pointer(2) if wrong == "pointer" else Pointer(0, 80)
        steps = (replace(steps[0], arguments=(bad, Pointer(1))),)
    settings.find = lambda graph: replace(plan, buffers=tuple(buffers), steps=steps)
    told = message(lambda: jit(lambda x: x * 2, target="gpu")(numbers(20)))
    assert "the kernels do not fit <lambda>" in told


def test_arrays_of_a_device_that_is_gone(stand_in):
    stand_in()
    x = put(numbers(8))
    stand_in()
    assert "not used any more" in message(lambda: double(8)(x))


def test_a_program_moves_to_the_next_device(stand_in):
    stand_in()
    f = double(8)
    np.testing.assert_array_equal(f(numbers(8)), numbers(8) * 2)
    stand_in()
    np.testing.assert_array_equal(f(numbers(8)), numbers(8) * 2)


# ---------------------------------------------------------------- arrays of others

class Foreign:
    """Another library's array, lent through __cuda_array_interface__."""

    def __init__(self, array, **changes):
        self.array, self.changes = put(array), changes

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    @property
    def __cuda_array_interface__(self):
        return {**self.array.__cuda_array_interface__, **self.changes}


def test_foreign_arrays_are_arguments(stand_in):
    api = stand_in()
    f, x = double(40), numbers(40)
    y = f(Foreign(x))
    assert isinstance(y, DeviceArray)
    assert not api.queue  # their owner may reuse the memory now
    np.testing.assert_array_equal(y.numpy(), x * 2)


def test_a_foreign_array_is_kept_alive(stand_in):
    stand_in()
    array = Foreign(numbers(5))
    seen = weakref.ref(array)
    ours = borrow(array)
    del array
    gc.collect()
    assert seen() is not None
    np.testing.assert_array_equal(ours.numpy(), numbers(5))
    del ours
    gc.collect()
    assert seen() is None


def test_a_foreign_stream_is_waited_for(stand_in):
    api = stand_in()
    theirs = api.handle("their stream")
    before = api.calls.get("cuStreamSynchronize", 0)
    array = Foreign(numbers(5), stream=theirs)
    borrow(array)
    assert api.calls["cuStreamSynchronize"] == before + 2  # ours when lent, theirs now


@pytest.mark.parametrize("changes, kind", [
    (dict(strides=(8,)), TypeError), (dict(typestr="<f2"), TypeError),
    (dict(typestr=">f4"), TypeError), (dict(mask=1), TypeError),
    (dict(data=(12345, False)), DeviceError)])
def test_foreign_arrays_that_are_refused(stand_in, changes, kind):
    stand_in()
    array = Foreign(numbers(5), **changes)
    with pytest.raises(kind):
        borrow(array, "x")


LIES = {
    "too long": dict(shape=(10_000,)), "far too long": dict(shape=(2**40, 2**30)),
    "in no memory": dict(data=(0, False)), "half an element on": dict(data=2),
    "negative": dict(shape=(-5,)), "no tuple": dict(shape=5), "words": dict(shape=("a",)),
    "no address": dict(data=None), "an address in words": dict(data=("x", False)),
    "an unknown type": dict(typestr="zz"), "objects": dict(typestr="|O"),
    "other axes": dict(strides=(4, 4)), "backwards": dict(strides=(-4,)),
    "the ambiguous stream": dict(stream=0), "a stream in words": dict(stream="a"),
    "an unknown stream": dict(stream=12345)}


@pytest.mark.parametrize("lie", LIES)
def test_what_an_array_says_about_itself_is_checked(stand_in, lie):
    api = stand_in()
    array = Foreign(numbers(5), **LIES[lie])
    if lie == "half an element on":
        array.changes = dict(data=(array.array.address + 2, False))
    told = message(lambda: borrow(array, "x"), TinymlirError)
    assert told.startswith("x: ") or lie == "an unknown stream"
    assert not api.broken
    np.testing.assert_array_equal(array.array.numpy(), numbers(5))


def test_a_description_without_its_parts_is_refused(stand_in):
    stand_in()

    class Bare:
        __cuda_array_interface__ = {"shape": (3,)}

    assert "KeyError: 'data'" in message(lambda: borrow(Bare(), "x"), TinymlirError)


@pytest.mark.parametrize("shape, strides", [
    ((1, 4), (999, 4)), ((3, 1), (4, 77)), ((0, 4), (1, 1)), ((), ()), ((2, 1, 3), (12, 5, 4))])
def test_strides_where_there_is_one_element_mean_nothing(stand_in, shape, strides):
    stand_in()
    x = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    array = Foreign(x, strides=strides)
    np.testing.assert_array_equal(borrow(array).numpy(), x)


@pytest.mark.parametrize("array", [
    np.arange(6, dtype=">f4"), np.arange(12.0).reshape(3, 4).T, np.arange(9)[::-2],
    np.zeros((0, 3)), np.float32(3), [1.0, 2.0], 5, True,
    np.frombuffer(b"\0" * 9, np.uint8)[1:].view(np.float64)], ids=repr)
def test_arrays_of_the_host_of_every_kind(stand_in, array):
    stand_in()
    there = put(array)
    np.testing.assert_array_equal(there.numpy(), np.asarray(array))
    assert there.shape == np.shape(array) and there.dtype.isnative


@pytest.mark.parametrize("array", [np.ma.array([1.0]), np.zeros(3, "f2"),
                                   np.zeros(2, complex), np.array(["a"]), np.array([None])])
def test_arrays_of_the_host_that_are_refused(stand_in, array):
    stand_in()
    message(lambda: put(array), TinymlirError)


def test_an_array_that_only_seems_to_be_on_the_device(stand_in):
    class Liar:
        @property
        def __cuda_array_interface__(self):
            raise AttributeError
    stand_in()
    with pytest.raises(TypeError, match="is not on the GPU"):
        borrow(Liar())


def test_lending_waits_for_the_work(stand_in):
    api = stand_in()
    y = double(40)(put(numbers(40)))
    assert api.queue
    told = y.__cuda_array_interface__
    assert not api.queue
    assert (told["shape"], told["typestr"], told["strides"], told["stream"]) == (
        (40,), "<f4", None, None)


@pytest.mark.parametrize("array", [
    numbers(6).reshape(2, 3), np.arange(6), np.arange(4, dtype=np.int32),
    np.array([True, False]), np.float64(3).reshape(()), np.zeros((0, 3))])
def test_dlpack_there_and_back(stand_in, array):
    stand_in()
    ours = put(array)
    assert ours.__dlpack_device__() == (2, 0)
    again = from_dlpack(ours)
    assert (again.shape, again.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(again.numpy(), array)


def test_dlpack_keeps_the_memory_and_lets_it_go(stand_in):
    from tinymlir import devarray
    stand_in()
    ours = put(numbers(9))
    memory = weakref.ref(ours.owner)
    theirs = from_dlpack(ours)
    del ours
    gc.collect()
    assert memory() is not None
    np.testing.assert_array_equal(theirs.numpy(), numbers(9))
    del theirs
    gc.collect()
    assert memory() is None
    capsule = put(numbers(3)).__dlpack__()
    assert len(devarray.lent) == 1
    put(numbers(3))  # whoever comes next finds that it is still held
    assert len(devarray.lent) == 1
    del capsule  # nobody took it
    put(numbers(3))
    assert not devarray.lent


@pytest.mark.parametrize("request_, kind, words", [
    (dict(copy=True), BufferError, "without a copy; x.numpy()"),
    (dict(dl_device=(1, 0)), BufferError, "without a copy"),
    (dict(dl_device=(2, 1)), BufferError, "where it is"),
    (dict(stream=0), BufferError, "stream 0 means nothing"),
    (dict(stream=-2), BufferError, "stream -2 means nothing"),
    (dict(stream="1"), TypeError, "expected an int or None"),
    (dict(stream=True), TypeError, "expected an int or None"),
    (dict(colour=1), TypeError, "colour")])
def test_a_tensor_that_cannot_be_lent_in_that_way(stand_in, request_, kind, words):
    stand_in()
    with pytest.raises(kind, match=re.escape(words)):
        put(numbers(3)).__dlpack__(**request_)


@pytest.mark.parametrize("request_", [
    {}, {"device": "cpu"}, {"copy": True}, {"copy": False}], ids=str)
def test_numpy_says_that_it_cannot_take_it(stand_in, request_):
    """And not that there was no exception: nothing of ours runs while one is on its way."""
    from tinymlir import devarray
    stand_in()
    x = put(numbers(3))
    memory = weakref.ref(x.owner)
    for _ in range(3):
        with pytest.raises((BufferError, RuntimeError), match="device|copy"):
            np.from_dlpack(x, **request_)
    del x
    put(numbers(1))
    assert not devarray.lent and memory() is None


@pytest.mark.parametrize("request_", [dict(stream=s) for s in (None, -1, 1, 2, 99)] + [
    dict(max_version=(1, 0)), dict(copy=False), dict(dl_device=(2, 0))], ids=str)
def test_what_the_specification_lets_others_ask_for(stand_in, request_):
    stand_in()
    assert "dltensor" in repr(put(numbers(3)).__dlpack__(**request_))


# ---------------------------------------------------------------- processes

def python(code, **env):
    return subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", code], text=True,
                          capture_output=True, timeout=120, cwd=os.path.dirname(__file__),
                          env={**os.environ, **env})


BEGIN = """
import os, sys, threading, warnings
import numpy as np
from by_hand import doubling, numbers
from tinymlir import jit
from tinymlir.cuda import settings
from tinymlir.devarray import put
from tinymlir.device import use, device
from tinymlir.standin import StandIn
use(StandIn())
settings.find = lambda graph: doubling(40, launches=30)
f = jit(lambda x: x * 2, target="gpu")
"""


def test_fork_after_use_is_one_line():
    done = python(BEGIN + """
warnings.simplefilter("ignore")
y = f(put(numbers(40)))
sys.stdout.flush()
if os.fork() == 0:
    try:
        y.numpy()
    except Exception as error:
        print(type(error).__name__, error)
    del y, f
    sys.exit()
os.wait()
assert np.array_equal(y.numpy(), numbers(40) * 2)
print("fine")
""")
    assert done.returncode == 0 and done.stderr == ""
    assert "DeviceError this process was forked after the GPU was used" in done.stdout
    assert done.stdout.endswith("fine\n")


def test_fork_before_use_is_fine():
    done = python("""
import os, sys
import tinymlir.cuda, tinymlir.device
if os.fork() == 0:
""" + "\n".join("    " + line for line in BEGIN.splitlines()) + """
    assert np.array_equal(f(numbers(40)), numbers(40) * 2)
    sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) - 7)
""")
    assert done.returncode == 0, done.stderr


def test_exit_with_everything_alive_and_threads_running():
    done = python(BEGIN + """
kept = [f(put(numbers(40))) for _ in range(5)]
class Cycle: pass
c = Cycle(); c.me, c.kept, c.f = c, kept, f
def work():
    while True:
        f(put(numbers(40)))
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
import time; time.sleep(0.5)
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_threads_share_the_device(stand_in):
    stand_in()
    f, wrong = double(300), []

    def work(seed):
        for i in range(8):
            x = numbers(300, seed * 100 + i)
            if not np.array_equal(f(put(x)).numpy(), x * 2):
                wrong.append((seed, i))
            gc.collect(0)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_of_cuda_is_imported_by_tinymlir():
    done = python("import sys, tinymlir, tinymlir.jit, tinymlir.cuda, tinymlir.device\n"
                  "tinymlir.jit\n"
                  "print([m for m in sys.modules if m.split('.')[0] in ('cuda', 'mlir')])")
    assert done.stdout == "[]\n", done.stderr


def test_no_bindings_installed():
    done = python("import sys; sys.modules['cuda'] = None\n"
                  "from tinymlir.device import device, available\nprint(available())\n"
                  "from tinymlir.driver import DeviceError\n"
                  "try: device()\nexcept DeviceError as error: print(error)")
    assert done.stdout == ("False\nno GPU: the package cuda-bindings is not installed; "
                           "`pip install tinymlir[gpu]` brings it\n"), done.stderr


@pytest.mark.skipif(available(), reason="this is about a machine without a GPU")
def test_the_real_bindings_without_a_driver():
    bindings = pytest.importorskip("cuda.bindings.driver")
    for _ in range(2):
        assert "there is no NVIDIA driver" in message(lambda: Driver(bindings)) or (
            "sees no device" in message(lambda: Driver(bindings)))


def test_the_stand_in_has_the_names_and_numbers_of_the_real_bindings():
    real = pytest.importorskip("cuda.bindings.driver")
    from tinymlir import standin, vram
    for name in standin.FUNCTIONS:
        assert callable(getattr(real, name))
    for kind in (vram.CUresult, standin.CUdevice_attribute, standin.CUjit_option,
                 standin.CUstreamCaptureMode, standin.CUfunction_attribute,
                 standin.CUpointer_attribute):
        for member in kind:
            assert int(getattr(getattr(real, kind.__name__), member.name)) == member


THROUGH_BINDINGS = """
import gc
import numpy as np
from by_hand import doubling, numbers
from tinymlir import jit
from tinymlir.cuda import settings
from tinymlir.device import device
from tinymlir.devarray import borrow, from_dlpack, put
from tinymlir.driver import DeviceError, Mark, Module
home, x = device(), numbers(40)
print(home.properties)
for launches in (1, 30):
    settings.find = lambda graph: doubling(40, launches=launches)
    f, there = jit(lambda x: x * 2, target="gpu"), put(x)
    assert np.array_equal(f(x), x * 2)
    assert np.array_equal(f(f(put(x))).numpy(), x * 4)
    for _ in range(4):
        assert np.array_equal(f(there).numpy(), x * 2)
with home.current():
    begin, end = Mark(home.stream), Mark(home.stream)
    print(end - begin, home.driver.call("cuMemGetInfo"))
    begin.forget(), end.forget()
    home.module(".version 8.0").function("double_kernel", 60000)
    try:
        Module(home.driver, ".version 8.0 BROKEN")
    except DeviceError as error:
        print(error)
class Theirs:
    array = put(x)
    @property
    def __cuda_array_interface__(self):
        return {**self.array.__cuda_array_interface__, "stream": int(home.stream.handle)}
assert np.array_equal(borrow(Theirs()).numpy(), x)
assert np.array_equal(from_dlpack(put(x)).numpy(), x)
class Liar:
    __cuda_array_interface__ = {**Theirs.array.__cuda_array_interface__, "shape": (4000,)}
for wrong in (lambda: borrow(Liar()), lambda: np.from_dlpack(put(x)), lambda: np.from_dlpack(
        put(x), copy=True)):
    try:
        wrong()
    except (DeviceError, BufferError, RuntimeError) as error:
        print(type(error).__name__)
del f, there, Theirs, Liar, begin, end
settings.find = None
gc.collect()
put(x)
put(x)
with home.current():
    home.pool.trim()
import ctypes
print(ctypes.CDLL("libcuda.so.1").stubLeft(), "left")
"""


@pytest.mark.skipif(available(), reason="this is about a machine without a GPU")
def test_the_real_bindings_take_what_we_pass(tmp_path):
    """NVIDIA's package, over a library in C that checks every argument that it gets."""
    pytest.importorskip("cuda.bindings.driver")
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler to make a libcuda with")
    source = os.path.join(os.path.dirname(__file__), "libcuda_stub.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", tmp_path / "libcuda.so.1", source,
                    "-ldl", "-Wl,-soname,libcuda.so.1"], check=True)
    done = python(THROUGH_BINDINGS, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Properties(name='a stub', capability=(9, 0), cuda=(13, 0), processors=132, "
        "shared=232448)",
        "1.5 [100, 200]",
        "cuModuleLoadDataEx: invalid ptx; ptxas fatal: it is broken",
        "DeviceError", "RuntimeError", "BufferError", "0 left"]
