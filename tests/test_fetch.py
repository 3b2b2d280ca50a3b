"""`tinymlir fetch` against a small hub on 127.0.0.1."""
import hashlib
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tiny
from huggingface_hub import constants, file_download  # noqa: F401 (its log goes to stderr as of now)

from tinymlir.checkpoint import FILES, read_checkpoint
from tinymlir.cli import main
from tinymlir.errors import CheckpointError
from tinymlir.fetch import REPOSITORY, REVISION, fetch

WEIGHTS = "model.safetensors"
ROOT = Path(__file__).parents[1]


class Hub:
    """Serves a folder as the hub does: HEAD tells size and hash, GET knows ranges, and
    the weights lie on another server.

    `cuts` holds, for each coming GET of the weights, after how many bytes the connection
    breaks; `status` answers instead of files; `lies` are contents to send instead.
    """

    def __init__(self, folder):
        self.files = {name: (folder / name).read_bytes() for name in FILES}
        self.cuts, self.status, self.lies, self.log = [], {}, {}, []
        self.front, self.store = serve(self), serve(self)
        self.address, self.store_address = (
            f"http://127.0.0.1:{s.server_port}" for s in (self.front, self.store))

    def gets(self, name=WEIGHTS):
        """The Range headers of the requests for this file's contents."""
        return [headers.get("Range") for method, path, headers in self.log
                if method == "GET" and path.endswith(name)]

    def close(self):
        for server in (self.front, self.store):
            server.shutdown()
            server.server_close()


def serve(hub):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.hub = True, hub
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer("HEAD")

    def do_GET(self):
        self.answer("GET")

    def answer(self, method):
        hub, name = self.server.hub, self.path.rpartition("/")[2]
        hub.log.append((method, self.path, self.headers))
        known = self.path == f"/{REPOSITORY}/resolve/{REVISION}/{name}" and name in FILES
        if status := hub.status.get((method, name)):
            self.send(status, b"", {})
        elif self.server is hub.store:
            self.contents(method, name, hub.lies.get(name, hub.files[name]))
        elif not known:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif name == WEIGHTS:
            digest = hashlib.sha256(hub.files[name]).hexdigest()
            self.send(302, b"", {
                "Location": f"{hub.store_address}/{name}", "X-Linked-Etag": f'"{digest}"',
                "X-Linked-Size": str(len(hub.files[name])), "X-Repo-Commit": REVISION})
        else:
            self.contents(method, name, hub.lies.get(name, hub.files[name]))

    def contents(self, method, name, data):
        ranged, size = self.headers.get("Range"), len(data)
        start = int(ranged.removeprefix("bytes=").rstrip("-")) if ranged else 0
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes",
                   "X-Repo-Commit": REVISION, "Content-Length": str(size - start)}
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        body = b"" if method == "HEAD" else data[start:]
        if method == "GET" and name == WEIGHTS and self.server.hub.cuts:
            body = body[:self.server.hub.cuts.pop(0)]
            self.close_connection = True
        self.send(206 if ranged else 200, body, headers)

    def send(self, status, body, headers):
        self.send_response(status)
        for key, value in {"Content-Length": "0", **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tiny.write_checkpoint(tmp_path / "origin"))
    for key in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
        monkeypatch.delenv(key.upper(), raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # ours is a small file
    yield hub
    hub.close()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "some" / "model"


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def finals(folder):
    return [name for name in FILES if (folder / name).exists()]


def refused(folder, capsys):
    """The one line that `tinymlir fetch` ends with."""
    assert main(["fetch", str(folder)]) == 1
    out, err = capsys.readouterr()
    last = err.replace("\r", "\n").strip().splitlines()[-1]
    assert out == "" and last.startswith("error: ") and "Traceback" not in err
    return last


def test_success(hub, target, capsys, monkeypatch):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # progress, although this is no terminal
    assert main(["fetch", str(target)]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "2 blocks of width 32" in err
    assert all(name in err for name in FILES) and err.count("100%") == len(FILES)
    assert contents(target) == hub.files
    assert sorted(p.name for p in target.iterdir()) == sorted(FILES)
    assert read_checkpoint(target).config.blocks == tiny.BLOCKS


def test_pinned_revision(hub, target):
    fetch(target)
    asked = {path for method, path, _ in hub.log if method == "HEAD"}
    assert asked == {f"/openai-community/gpt2/resolve/{REVISION}/{name}" for name in FILES}
    assert REVISION == "607a30d783dfa663caf39e06633721c8d4cfcd7e"


def test_default_folder_and_script(hub, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "fetch_model.py"], cwd=tmp_path, capture_output=True,
        text=True, env=environment(), timeout=120)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert contents(tmp_path / "model") == hub.files


def test_endpoint_with_a_slash(hub, target, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.address + "/")
    fetch(target)
    assert contents(target) == hub.files


def test_cut_connection_goes_on(hub, target):
    hub.cuts = [50_000]
    fetch(target)
    assert contents(target) == hub.files
    assert hub.gets() == [None, "bytes=50000-"]


def test_interrupted_run_is_continued(hub, target, capsys, monkeypatch):
    def give_up(seconds):  # the pause before another attempt; by then the store is down
        hub.status["GET", WEIGHTS] = 503

    hub.cuts = [60_000]
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", give_up)
    assert "503" in refused(target, capsys) and finals(target) == []
    part, = (target / ".incomplete").glob("*.part")
    had = part.stat().st_size
    assert had == 60_000

    hub.status, hub.log = {}, []
    assert main(["fetch", str(target)]) == 0
    assert hub.gets() == [f"bytes={had}-"] and hub.gets("config.json") == []
    assert contents(target) == hub.files and not (target / ".incomplete").exists()


def test_killed_process_is_continued(hub, target):
    """Not even `finally` runs."""
    code = ("import os, sys, time, tinymlir.cli\n"
            "from huggingface_hub import constants\n"
            "constants.DOWNLOAD_CHUNK_SIZE = 1000\n"
            "time.sleep = lambda seconds: os._exit(9)\n"
            "tinymlir.cli.main(sys.argv[1:])")
    hub.cuts = [30_000]
    done = subprocess.run([sys.executable, "-c", code, "fetch", str(target)], timeout=120,
                          capture_output=True, env=environment())
    assert done.returncode == 9 and finals(target) == []
    fetch(target)
    resumed = hub.gets()[-1]
    assert 0 < int(resumed.removeprefix("bytes=").rstrip("-")) <= 30_000
    assert contents(target) == hub.files


def test_part_that_is_whole(hub, target):
    """Killed after the last byte, before the move."""
    aside = target / ".incomplete"
    aside.mkdir(parents=True)
    (aside / f"{WEIGHTS}.part").write_bytes(hub.files[WEIGHTS])
    fetch(target)
    assert hub.gets() == [] and contents(target) == hub.files


def test_part_that_is_too_long(hub, target):
    aside = target / ".incomplete"
    aside.mkdir(parents=True)
    (aside / f"{WEIGHTS}.part").write_bytes(hub.files[WEIGHTS] + b"more")
    fetch(target)
    assert hub.gets() == [None] and contents(target) == hub.files


def test_part_of_something_else(hub, target, capsys):
    aside = target / ".incomplete"
    aside.mkdir(parents=True)
    (aside / f"{WEIGHTS}.part").write_bytes(b"x" * 1000)
    assert "SHA-256" in refused(target, capsys) and finals(target) == []
    assert main(["fetch", str(target)]) == 0 and contents(target) == hub.files


@pytest.mark.parametrize("status", [403, 404, 500])
@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_hub_that_refuses(hub, target, capsys, name, method, status):
    hub.status[method, name] = status
    line = refused(target, capsys)
    assert name in line and str(status) in line and finals(target) == []


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def test_wrong_bytes(hub, target, capsys):
    hub.lies[WEIGHTS] = flipped(hub.files[WEIGHTS])
    assert f"error: {WEIGHTS}: expected SHA-256" in refused(target, capsys)
    assert finals(target) == [] and not (target / ".incomplete" / WEIGHTS).exists()
    hub.lies = {}
    assert main(["fetch", str(target)]) == 0 and contents(target) == hub.files


def test_fewer_bytes_than_promised(hub, target, capsys):
    hub.lies[WEIGHTS] = hub.files[WEIGHTS][:1000]
    assert WEIGHTS in refused(target, capsys) and finals(target) == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_page_in_place_of_a_file(hub, target, capsys, name):
    hub.lies[name] = b"<!DOCTYPE html><html>Please log in</html>"
    line = refused(target, capsys)
    assert name in line and "web page" in line
    assert list(target.iterdir()) == []  # thrown away, so that the next try is a fresh one
    hub.lies = {}
    assert main(["fetch", str(target)]) == 0


def test_weights_of_another_model(hub, target, capsys):
    hub.files["config.json"] = hub.files["config.json"].replace(b"gelu_new", b"relu")
    assert "activation_function" in refused(target, capsys) and finals(target) == []


def test_no_network(hub, target, capsys):
    hub.close()
    line = refused(target, capsys)
    assert "config.json" in line and finals(target) == []


def test_checkpoint_that_is_there_stays(hub, target):
    tiny.write_checkpoint(target)
    tiny.write_config(target, attn_pdrop=0.25)
    before = contents(target)
    assert fetch(target).config.width == tiny.WIDTH
    assert contents(target) == before and hub.log == []


def test_damaged_checkpoint_is_named(hub, target):
    tiny.write_checkpoint(target)
    (target / WEIGHTS).write_bytes(b"")
    with pytest.raises(CheckpointError, match="empty"):
        fetch(target)


def test_file_where_the_folder_should_be(hub, tmp_path, capsys):
    (tmp_path / "model").write_text("mine")
    assert "model" in refused(tmp_path / "model", capsys)
    assert (tmp_path / "model").read_text() == "mine"


def test_no_token_is_sent(hub, target, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(target)
    assert {headers.get("Authorization") for _, _, headers in hub.log} == {None}
