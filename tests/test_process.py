"""Whole processes: quiet in development mode, and a clean end whatever is going on."""
import os
import subprocess
import sys

import pytest

PROGRAMS = {
    "a function": """
import numpy as np
from tinymlir import jit
x = np.linspace(0, 1, 12).reshape(3, 4)
y = jit(lambda x: (np.tanh(x) @ x.T, np.sum(x), x[::-1]))(x)
assert np.allclose(y[0], np.tanh(x) @ x.T)
""",
    "exit while threads compile and run": """
import threading, time
import numpy as np
from tinymlir import jit
f = jit(lambda x: np.exp(x) @ x.T)
def work(n):
    while True:
        f(np.ones((n, 3)))
        n += 1
for i in range(2):
    threading.Thread(target=work, args=(2 + 50 * i,), daemon=True).start()
time.sleep(1.5)
""",
    "exit with live kernels in globals and cycles": """
import numpy as np
from tinymlir import jit
f = jit(lambda x: x @ x)
c = f.compile(np.ones((3, 3)))
class Keeper: pass
k = Keeper(); k.me, k.c = k, c
print
""",
    "errors of every kind": """
import numpy as np
from tinymlir import jit
for f in (lambda x: x[9], lambda x: x @ np.ones(9), lambda x: 1 if x[0] else 2,
          lambda x: np.sort(x), lambda x: x.nothing, lambda x: x + 2**70):
    try:
        jit(f)(np.arange(3))
    except Exception:
        pass
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_processes_end_well_and_say_nothing(name, tmp_path):
    env = {**os.environ, "TINYMLIR_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-X", "faulthandler",
                           "-c", PROGRAMS[name]], text=True, capture_output=True, env=env,
                          timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_command_in_development_mode():
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-m", "tinymlir",
                           "generate", "The king", "--tokens", "4"], text=True,
                          capture_output=True)
    assert done.returncode == 0 and done.stdout.strip()
    assert done.stderr == "model: the bundled one (tales)\n"
