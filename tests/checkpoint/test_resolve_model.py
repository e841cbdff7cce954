import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine_core.checkpoint import resolve_model
from engine_core.errors import CheckpointNotFoundError

COMMIT = "a" * 40
ASK = """
import sys
from engine_core.checkpoint import resolve_model
from engine_core.errors import CheckpointNotFoundError
try:
    print(resolve_model(*sys.argv[1:]))
except CheckpointNotFoundError as error:
    print("refused:", error)
"""


def ask(home, *arguments, **environment):
    """Resolve in a process of its own: the hub's library reads its settings when imported."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, *arguments],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout.strip()


@pytest.fixture
def hub():
    """A hub with two repositories."""
    small = dict.fromkeys(["config.json", "tokenizer.model", "chat_template.jinja", "merges.txt"])
    repositories = {
        "org/safe": [*small, "model.safetensors", "pytorch_model.bin", "x.onnx", "photo.png"],
        "org/bin": [*small, "pytorch_model.bin", "x.onnx"],
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(body=True)

        def do_HEAD(self):
            self.answer(body=False)

        def answer(self, body):
            parts = self.path.split("?")[0].strip("/").split("/")
            name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
            files = repositories.get(name)
            headers = {"X-Repo-Commit": COMMIT}
            if files is None:
                status, data = 404, b"{}"
                headers["X-Error-Code"] = "RepoNotFound"
            elif parts[0] == "api" and "tree" in parts:
                status = 200
                data = json.dumps(
                    [{"type": "file", "path": f, "size": len(f), "oid": "0" * 40} for f in files]
                ).encode()
            elif parts[0] == "api":
                siblings = [{"rfilename": file} for file in files]
                status = 200
                data = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            else:
                status, data = 200, parts[-1].encode()
                headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_folder_and_a_gguf_file_are_taken_as_they_are(tmp_path, monkeypatch):
    assert resolve_model(str(tmp_path)) == tmp_path
    file = tmp_path / "Model.GGUF"
    file.write_bytes(b"")
    assert resolve_model(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_model(f"~/{tmp_path.name}") == tmp_path


def test_another_file_is_refused(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="give the folder it lies in"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    "model",
    ["./a/b", "/a/b", "../b", "~/b", "a/b/c", "a\\b", "model.gguf", "a/b.safetensors", "a b", "",
     "a/", "~nobody-of-that-name/a", "a\nb", "a\0b", "x" * 5000, "a--b/c", "a/..", "http://host/a"],
)  # fmt: skip
def test_a_path_is_never_sent_to_a_hub(model, tmp_path, monkeypatch):
    import huggingface_hub

    def never(*arguments, **options):
        raise AssertionError("the hub was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", never)
    with pytest.raises(CheckpointNotFoundError):
        resolve_model(model)


def test_a_hub_id_brings_only_what_is_needed(tmp_path, hub):
    small = {"config.json", "tokenizer.model", "chat_template.jinja", "merges.txt"}
    for name, weights in (("org/safe", "model.safetensors"), ("org/bin", "pytorch_model.bin")):
        folder = tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
        assert ask(tmp_path, name, HF_ENDPOINT=hub) == str(folder)
        assert {path.name for path in folder.iterdir()} == {*small, weights}
        assert ask(tmp_path, name, HF_HUB_OFFLINE="1") == str(folder)
        assert ask(tmp_path, name, HF_ENDPOINT="http://127.0.0.1:9") == str(folder)


def test_an_unknown_hub_id(tmp_path, hub):
    answer = ask(tmp_path, "org/none", "v2", HF_ENDPOINT=hub)
    assert answer.startswith("refused: 'org/none@v2' is no folder here")
    assert "and the hub refuses" in answer
    answer = ask(tmp_path, "org/none", HF_HUB_OFFLINE="1")
    assert "nor whole in the hub's cache" in answer
    assert str(tmp_path) in answer
    assert answer.endswith("the hub; unset it, or give a folder or a .gguf file")
    answer = ask(tmp_path, "org/none", HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub cannot be reached" in answer
    assert answer.endswith("; try again with a connection, or give a folder or a .gguf file")
