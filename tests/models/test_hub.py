"""The hub is asked once, however it answers. A server on this machine stands for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from rhymerl.errors import ConfigError
from rhymerl.models.hub import look_up

Answer = tuple[int, str]  # status and error code


@contextmanager
def hub(answer: Answer | None) -> Iterator[tuple[str, list[str]]]:
    """Its address and the paths that it is asked for; without an answer it hangs up."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "owner" in self.path:  # the client asks for something else of its own
                asked.append(self.path)
            if answer is None:
                self.close_connection = True
                return
            self.send_response(answer[0])
            self.send_header("X-Error-Code", answer[1])
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(address: str, home: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Ask in another process, because the hub's client reads its settings when it is imported."""
    proxies = {name: "" for name in os.environ if name.lower().endswith("_proxy")}
    online = {
        **proxies,
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
    }
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env={**os.environ, **online}
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "RepoNotFound"), "has no model of that name that you may read"),
        (None, "nothing of it has been downloaded before"),
    ],
)
def test_a_model_that_is_not_there_is_asked_for_once(answer: Answer | None, words: str, tmp_path: Path) -> None:
    code = (
        "from rhymerl.cli import main; import sys;"
        "sys.exit(main(['fit', '--config', 'quickstart', 'model.path=owner/nothing']))"
    )
    with hub(answer) as (address, asked):
        done = ask(address, tmp_path, code)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.path='owner/nothing': no such file or directory, and the Hugging Face")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert asked == ["/api/models/owner/nothing"]


def test_a_data_set_that_is_not_there(tmp_path: Path) -> None:
    code = "from rhymerl.models.hub import look_up; look_up('owner/nothing', 'data.train', kind='dataset')"
    with hub((404, "RepoNotFound")) as (address, asked):
        done = ask(address, tmp_path, code)
    assert (
        "data.train='owner/nothing': no such file or directory, and the Hugging Face hub has no dataset" in done.stderr
    )
    assert asked == ["/api/datasets/owner/nothing"]


@pytest.mark.parametrize(
    ("answer", "is_there", "printed"),
    [((200, ""), False, "True"), ((503, ""), False, "True"), (None, True, "False")],
)
def test_what_the_hub_or_the_disk_has(answer: Answer | None, is_there: bool, printed: str, tmp_path: Path) -> None:
    if is_there:
        folder = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    code = "from rhymerl.models.hub import look_up; print(look_up('owner/name', 'model.path', kind='model'))"
    with hub(answer) as (address, asked):
        done = ask(address, tmp_path, code)
    assert (done.stdout, len(asked)) == (f"{printed}\n", 1), done.stderr


def test_a_name_that_cannot_be_one() -> None:
    with pytest.raises(ConfigError, match="model.path='a model': no such file or directory, and .* has no such names"):
        look_up("a model", "model.path", kind="model")
