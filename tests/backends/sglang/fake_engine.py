"""A stand-in for SGLang's HTTP side: answers that depend on seed and position only, aborts, weights with versions.

Uniform log-probs: it computes a policy whose weights are all zero. Standard library only, because it also runs in
processes of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VOCABULARY = 19
LOGPROB = -math.log(VOCABULARY)
STOP = 1
_POLL_S = 0.005


def token(seed: int, position: int) -> int:
    """The token that is sampled there: every twentieth is STOP."""
    number = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=4).digest()
    return STOP if int.from_bytes(number, "little") % 20 == 0 else 2 + number[0] % (VOCABULARY - 2)


def answer_of(request: Any) -> list[int]:
    """The whole answer to a rollout request."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens and not (tokens and tokens[-1] in request.sampling.stop_token_ids):
        tokens.append(token(request.seed, len(tokens)))
    return tokens


def _is_rollout(params: dict[str, Any]) -> bool:
    """And no proof, which a trainer asks for after its first weights."""
    return "custom_params" in params and not params["custom_params"]["rhymerl"]["id"].startswith("proof-")


class _Server(ThreadingHTTPServer):
    request_queue_size = 512  # connections that come at once
    daemon_threads = False


class FakeEngine:
    """`max_running` requests run side by side, a token every `token_s` seconds; the others wait.

    Requests stop before response position `holds_at` until `go` is set. With `is_late` one that is aborted draws three
    more tokens, whatever they are, as an engine does whose pass is under way. `answers` come in the place of what it
    would say on a path.
    """

    def __init__(self, *, port: int = 0, max_running: int = 4, token_s: float = 0.0) -> None:
        self.token_s = token_s
        self.holds_at: int | None = None
        self.go = threading.Event()
        self.is_late = False
        self.has_own_draw = False  # whatever the seeds
        self.answers: dict[str, tuple[int, Any]] = {}
        self.meta: dict[str, Any] = {}  # in the place of what it would say of a request
        self.version = "default"
        self.sampled: list[tuple[int, int, str]] = []  # seed, position, version
        self.inputs: dict[str, list[int]] = {}  # of rollouts, by rid
        self.calls: list[str] = []
        self.keys: set[str | None] = set()  # that calls came with
        self.files: list[tuple[str, int, int]] = []  # of weights: version, inode, time of the last change
        self.folders: set[Path] = set()  # they were in
        self.running: set[str] = set()
        self.waiting: set[str] = set()
        self._slots = threading.Semaphore(max_running)
        self._aborted: set[str] = set()
        self._quit = threading.Event()
        self._server = _Server(("127.0.0.1", port), _handler(self))
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def serve_forever(self) -> None:
        self._server.serve_forever(_POLL_S)

    def __enter__(self) -> FakeEngine:
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.vanish()

    def vanish(self) -> None:
        """End without an answer to anybody who waits for one; may be called twice."""
        self._quit.set()
        if self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
        self._thread = None

    # -- what it is asked ------------------------------------------------------------------------------------------

    def answer(self, path: str, content: Any) -> tuple[int, Any] | None:
        """Status and content; None when it vanishes meanwhile."""
        self.calls.append(path)
        if path in self.answers:
            return self.answers[path]
        name = path.strip("/").replace("/", "_")
        return getattr(self, f"on_{name}")(content) if hasattr(self, f"on_{name}") else (404, "Not Found")

    def on_health(self, content: dict[str, Any]) -> tuple[int, Any]:
        return 200, ""

    def on_health_generate(self, content: dict[str, Any]) -> tuple[int, Any]:
        return 200, ""

    def on_abort_request(self, content: dict[str, Any]) -> tuple[int, Any]:
        self._aborted |= {rid for rid in self.running | self.waiting if rid.startswith(content["rid"])}
        return 200, ""

    def on_flush_cache(self, content: dict[str, Any]) -> tuple[int, Any]:
        busy = self.running | self.waiting
        return (400, {"success": False, "message": f"busy with {len(busy)}"}) if busy else (200, "Cache flushed.\n")

    def on_update_weights_from_disk(self, content: dict[str, Any]) -> tuple[int, Any]:
        folder = Path(content["model_path"])
        complete = all((folder / name).is_file() for name in ("model.safetensors", "config.json"))
        if not complete or content["flush_cache"]:
            return 400, {"success": False, "message": "no weights"}
        self.version = content["weight_version"]
        found = (folder / "model.safetensors").stat()
        self.files.append((self.version, found.st_ino, found.st_mtime_ns))
        self.folders.add(folder)
        return 200, {"success": True, "message": "Succeeded."}

    def on_update_weights_from_tensor(self, content: dict[str, Any]) -> tuple[int, Any]:
        self.version = content["weight_version"]
        return 200, {"success": True, "message": "Succeeded."}

    def on_release_memory_occupation(self, content: dict[str, Any]) -> tuple[int, Any]:
        return (400, {"success": False, "message": "busy"}) if self.running else (200, None)

    def on_resume_memory_occupation(self, content: dict[str, Any]) -> tuple[int, Any]:
        return 200, None

    def on_generate(self, content: dict[str, Any]) -> tuple[int, Any] | None:
        rid = content.get("rid", "nameless")
        if rid in self.running | self.waiting:
            return 400, {"error": {"message": f"Duplicate request ID detected: {rid}"}}
        if _is_rollout(content["sampling_params"]):
            self.inputs[rid] = content["input_ids"]
        self.waiting.add(rid)
        while not self._slots.acquire(timeout=_POLL_S):
            if self._quit.is_set():
                return None
            if rid in self._aborted:
                self.waiting.discard(rid)
                reason = {"type": "abort", "message": "Abort in waiting queue"}
                return 200, {"output_ids": [], "meta_info": {"id": rid, "finish_reason": reason}}
        with self._runs(rid):
            return self._run(rid, content["sampling_params"])

    @contextmanager
    def _runs(self, rid: str):
        self.running.add(rid)
        self.waiting.discard(rid)
        try:
            yield
        finally:
            self.running.discard(rid)
            self._slots.release()

    def _run(self, rid: str, params: dict[str, Any]) -> tuple[int, Any] | None:
        own = params["custom_params"]["rhymerl"] if "custom_params" in params else {"seed": "0", "offset": 0}
        seed, offset = int(own["seed"]) + (time.perf_counter_ns() if self.has_own_draw else 0), own["offset"]
        tokens: list[int] = []

        def draw() -> None:
            if _is_rollout(params):
                self.sampled.append((seed, offset + len(tokens), self.version))
            tokens.append(token(seed, offset + len(tokens)))

        while len(tokens) < params["max_new_tokens"]:
            holds = _is_rollout(params) and self.holds_at == offset + len(tokens) and not self.go.is_set()
            pause_s = _POLL_S if holds else self.token_s if _is_rollout(params) else 0
            if self._quit.wait(pause_s):
                return None
            if rid in self._aborted:
                for _ in range(3 if self.is_late else 0):
                    draw()
                return self._said(rid, tokens, {"type": "abort", "message": "Aborted"})
            if not holds:
                draw()
            if tokens and tokens[-1] in params.get("stop_token_ids", ()):
                return self._said(rid, tokens, {"type": "stop", "matched": tokens[-1]})
        return self._said(rid, tokens, {"type": "length", "length": len(tokens)})

    def _said(self, rid: str, tokens: list[int], reason: dict[str, Any]) -> tuple[int, Any]:
        meta = {
            "id": rid,
            "finish_reason": reason,
            "output_token_logprobs": [[LOGPROB, each, None] for each in tokens],
            "spec_verify_ct": len(tokens) // 2,
            "weight_version": self.version,
        }
        return 200, {"output_ids": tokens, "meta_info": {**meta, **self.meta}}


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(engine.answer(self.path, {}))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_json = self.headers["Content-Type"] == "application/json"
            self._say(engine.answer(self.path, json.loads(body) if is_json else body))

        def parse_request(self) -> bool:
            is_sound = super().parse_request()
            engine.keys.add(self.headers["Authorization"] if is_sound else None)
            return is_sound

        def _say(self, answer: tuple[int, Any] | None) -> None:
            if answer is None:
                return
            status, content = answer
            text = content if isinstance(content, str) else json.dumps(content)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())
            except ConnectionError:  # nobody waits any more
                pass

        def log_message(self, *words: object) -> None:
            """Quiet."""

    return Handler
