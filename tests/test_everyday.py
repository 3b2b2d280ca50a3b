"""`tinymlir chat` and `tinymlir doctor`, as a shell and as a terminal sees them."""
import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from tinymlir import cli, doctor
from tinymlir.chat import Chat, add_line, answer, make_room
from tinymlir.checkpoint import BUNDLED
from tinymlir.errors import GenerationError
from tinymlir.model import generate, generate_ids, load_model

CHAT = [sys.executable, "-m", "tinymlir", "chat"]


@pytest.fixture(scope="module")
def loaded():
    return load_model(BUNDLED, cache=True)


def shell(*arguments, text=b"", **environment):
    return subprocess.run([*CHAT, *arguments], input=text, capture_output=True, timeout=300,
                          env={**os.environ, **environment}, check=False)


# ---------------------------------------------------------------- chat

def test_an_answer_is_what_generate_says(loaded):
    chat, said = Chat(*loaded, tokens=10), []
    add_line(chat, "The king said")
    assert answer(chat, said.append) == 10
    assert "".join(said) == generate(*loaded, "The king said", 10)


def test_the_text_goes_on(loaded):
    """Two turns are one text: the second answer follows from all before it."""
    chat, said = Chat(*loaded, tokens=6), []
    add_line(chat, "The king said")
    answer(chat, said.append)
    add_line(chat, " and then")
    text = loaded[1].decode(chat.ids, skip_special_tokens=False)
    assert text == "The king said" + "".join(said) + " and then"
    add_line(chat, "Once")
    assert loaded[1].decode(chat.ids, skip_special_tokens=False) == text + "\nOnce"


def test_only_what_must_go_is_forgotten(loaded):
    context = loaded[0].config.context
    for length, gone in ((context - 7, 0), (context - 6, 1), (3 * context, 2 * context + 7)):
        chat = Chat(*loaded, tokens=7, ids=list(range(length)))
        assert make_room(chat) == gone
        assert chat.ids == list(range(gone, length))


def test_nothing_to_go_on_from(loaded):
    with pytest.raises(GenerationError, match="nothing to go on from"):
        add_line(Chat(*loaded), "")


def test_ctrl_c_keeps_what_was_written(loaded):
    chat = Chat(*loaded, tokens=20)
    add_line(chat, "The king said")
    before, said = len(chat.ids), []

    def write(piece):
        said.append(piece)
        if len(said) == 3:
            raise KeyboardInterrupt

    assert answer(chat, write) == len(chat.ids) - before < 20
    text = loaded[1].decode(chat.ids, skip_special_tokens=False)
    assert text.startswith("The king said" + "".join(said))
    want = generate_ids(loaded[0], chat.ids, 20)
    answer(chat, said.append)  # the interruption has left nothing behind
    assert chat.ids[-20:] == want


def test_a_pipe(loaded):
    done = shell("--tokens", "8", text="The king said\n\nDie Königin".encode())
    assert done.returncode == 0, done.stderr
    first = generate(*loaded, "The king said", 16)
    lines = done.stdout.decode()
    assert lines.replace("\n", "").startswith(first[:20].replace("\n", ""))
    assert ">" not in lines and "note" not in lines  # the text alone
    assert done.stderr.count(b" a second") == 3


def test_a_line_that_is_not_text_costs_a_message():
    done = shell("--tokens", "2", text=b"\n\xff\xfe\nOnce upon\n")
    assert done.returncode == 0
    told = done.stderr.decode().splitlines()
    assert sum(line.startswith("error: ") for line in told) == 2
    assert "nothing to go on from" in done.stderr.decode() and "UTF-8" in done.stderr.decode()
    assert done.stdout.strip()


def test_trimming_is_told(loaded):
    words = " ".join(["king"] * 300).encode()
    done = shell("--tokens", "2", text=words + b"\n")
    assert done.returncode == 0
    assert b"note: the oldest " in done.stderr and b"are forgotten" in done.stderr


def test_more_tokens_than_the_model_has_places():
    done = shell("--tokens", "256", text=b"Once\n")
    assert done.returncode == 2 and b"expected less than the context of 256" in done.stderr
    assert done.stdout == b""


def test_nobody_reads_on():
    done = subprocess.run(f"printf 'Once\\n\\n\\n' | {' '.join(CHAT)} --tokens 30 | head -c 1",
                          shell=True, capture_output=True, timeout=300, check=False)
    assert b"Traceback" not in done.stderr


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *command):
        self.pid, self.fd = pty.fork()
        if not self.pid:
            import signal
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execv(command[0], command)
        self.seen = b""

    def until(self, text, again=b"", seconds=120):
        """What comes before this text; `again` is typed until it comes."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if not select.select([self.fd], [], [], 1)[0]:
                self.type(again)
            else:
                try:
                    self.seen += os.read(self.fd, 4096)
                except OSError:  # the other side has gone
                    assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text):
        os.write(self.fd, text)

    def status(self, seconds=120):
        """Say that there are no more lines, until it has heard it and ends by itself."""
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # the other side has gone
            self.type(b"\x04")
            while time.monotonic() < end:
                if not select.select([self.fd], [], [], 1)[0]:
                    self.type(b"\x04")  # it was not listening yet
                elif not os.read(self.fd, 4096):
                    break
        found = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return found


def test_on_a_terminal():
    terminal = Terminal(*CHAT, "--tokens", "200")
    terminal.until(b"> ")
    terminal.type(b"Once upon a time there")
    time.sleep(0.2)
    terminal.type(b"\n")
    terminal.until(b"was a man")
    terminal.type(b"\x03")  # enough, but do not quit
    terminal.until(b"note: ")
    assert 0 < int(terminal.until(b" tokens")) < 200
    terminal.until(b"> ")
    terminal.type(b"\x03")  # a line that was not meant
    terminal.until(b"> ", again=b"\x03")  # a key just when the prompt appears can be lost
    assert terminal.status() == 0


# ---------------------------------------------------------------- patience

SLOW = """
import sys, time
from tinymlir import cli, progress
from tinymlir.jit import Compiled
progress.Progress.__init__.__defaults__ = (2.0, 0.2)
compile_ = Compiled.__post_init__
Compiled.__post_init__ = lambda self: (time.sleep(float(sys.argv[1])), compile_(self))
sys.exit(cli.main(sys.argv[2:]))
"""
SLOWLY = [sys.executable, "-c", SLOW]
GENERATE = ["generate", "Once", "--tokens", "1", "--cache"]


def test_long_compilations_are_told_on_a_terminal():
    terminal = Terminal(*SLOWLY, "3.5", *GENERATE)
    before = terminal.until(b"[compiling ")
    assert before.endswith(b"\x1b7") and b" s]" not in before
    told = terminal.until(b" upon")
    assert re.match(rb"step, \d+ s\]", told) and told.rstrip().endswith(b"\x1b8\x1b[J")


def test_short_ones_are_not():
    import io

    from tinymlir.progress import Progress
    screen = io.StringIO()
    with Progress(screen, after=600)("something"):
        time.sleep(0.05)
    assert screen.getvalue() == ""


@pytest.mark.parametrize("words", [GENERATE, ["emit", "gelu"], ["verify", "--tokens", "1"]])
def test_a_pipe_is_not_told(words):
    done = subprocess.run([*SLOWLY, "2.5", *words], capture_output=True, timeout=600, check=False)
    assert done.returncode == 0 and b"compiling" not in done.stderr + done.stdout


def test_side_by_side_the_last_one_is_told():
    import io

    from tinymlir.progress import BACK, SAVE, Progress
    screen = io.StringIO()
    watch = Progress(screen, after=0, every=0.01)
    with watch("outer"):
        with watch("inner"):
            while "inner" not in screen.getvalue():
                time.sleep(0.01)
        assert screen.getvalue().endswith(BACK)
        seen = len(screen.getvalue())
        while "outer" not in screen.getvalue()[seen:]:
            time.sleep(0.01)
    assert screen.getvalue().endswith(BACK) and watch.tasks == []
    assert screen.getvalue().count(SAVE) == screen.getvalue().count(BACK)


# ---------------------------------------------------------------- doctor

def doctor_says(monkeypatch, capsys, checks):
    monkeypatch.setattr(doctor, "CHECKS", checks)
    status = cli.main(["doctor"])
    return status, capsys.readouterr().out


def broken():
    raise RuntimeError("two\nlines")


def test_all_is_well_here(capsys):
    assert cli.main(["doctor"]) == 0
    told = capsys.readouterr().out
    for name in ("Python", "NumPy", "MLIR", "LLVM", "compiled code", "threads", "kernel cache"):
        assert f"ok      {name}" in told


@pytest.mark.parametrize(("needed", "status", "state"), [(True, 1, "MISSING"), (False, 0, "-")])
def test_what_is_missing(monkeypatch, capsys, needed, status, state):
    checks = [doctor.Check("this", broken, "that", needed),
              doctor.Check("other", lambda: "1.2", "", True)]
    found, told = doctor_says(monkeypatch, capsys, checks)
    assert found == status
    assert told.splitlines()[0] == f"{state:8}{'this':16}two lines"
    assert told.splitlines()[1].strip() == "without it: no that"
    assert told.splitlines()[2].startswith("ok      other")


def test_a_wrong_product_is_found(monkeypatch):
    import numpy as np

    class Wrong(np.ndarray):
        def __matmul__(self, other):
            return np.asarray(self) @ np.asarray(other) + (self.dtype.kind == "f")

    real = np.arange
    monkeypatch.setattr(np, "arange", lambda *a: real(*a).view(Wrong))
    with pytest.raises(RuntimeError, match="a matrix product is wrong"):
        doctor.ask_numpy()


@pytest.mark.parametrize(("program", "said"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
    ("raise ValueError('no good')", "ValueError: no good"),
])
def test_native_code_cannot_kill_the_doctor(monkeypatch, program, said):
    monkeypatch.setattr(doctor, "PRODUCT", program)
    with pytest.raises(RuntimeError, match=said):
        doctor.ask_compiled()


def test_a_cache_that_cannot_be_used(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYMLIR_CACHE", "off")
    assert doctor.ask_cache() == "off (TINYMLIR_CACHE=off)"
    monkeypatch.setenv("TINYMLIR_CACHE", str(tmp_path / "new/folder"))
    assert "0 files" in doctor.ask_cache()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RuntimeError, match="cannot be written to"):
        doctor.ask_cache()


def test_it_works_without_numpy(tmp_path):
    """Whoever has a broken NumPy needs a doctor most."""
    (tmp_path / "numpy.py").write_text("raise ImportError('numpy is broken')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-m", "tinymlir", "doctor"], text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False)
    assert done.returncode == 1
    assert "MISSING NumPy           numpy is broken" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
