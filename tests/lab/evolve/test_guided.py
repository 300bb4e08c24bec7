"""OpenEvolve itself against an endpoint that always answers the same, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from splitkv.lab.evolve import guided
from splitkv.lab.harness.lines import read

LINE = "    num_splits = 16 if seqlen_k < 256 else 12\n"
CHANGED = "    num_splits = 8 if seqlen_k < 256 else 8\n"
ANSWER = f"Fewer parts.\n<<<<<<< SEARCH\n{LINE}=======\n{CHANGED}>>>>>>> REPLACE\n"


class Endpoint(BaseHTTPRequestHandler):
    """Chat completions in OpenAI's protocol."""

    asked: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Endpoint.asked.append({**asked, "path": self.path})
        message = {"role": "assistant", "content": ANSWER}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        about = {"id": "1", "object": "chat.completion", "created": 0, "model": asked["model"]}
        told = json.dumps({**about, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api_base() -> Iterator[str]:
    Endpoint.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_answer_is_a_change_of_the_start() -> None:
    assert guided.START.count(LINE) == 1


@pytest.mark.skipif(
    importlib.util.find_spec("openevolve") is None, reason="the evolve extra is not installed"
)
def test_a_models_change_is_judged_and_written_down(tmp_path: Path, api_base: str) -> None:
    folder = tmp_path / "search"
    command = [sys.executable, "-m", "splitkv", "evolve", "--out", str(folder)]
    given = ["--simulate", "h200", "--proposer", "openevolve", "--model", "nobody's"]
    more = ["--api-base", api_base, "--generations", "1"]
    log = tmp_path / "log"
    with log.open("w") as file:  # a pipe would be waited for as long as OpenEvolve's workers live
        ran = subprocess.run([*command, *given, *more], stdout=file, stderr=file, timeout=60)
    assert ran.returncode in (0, 1), log.read_text()  # 1: nothing was faster than the default
    assert [asked["model"] for asked in Endpoint.asked] == ["nobody's"]
    assert Endpoint.asked[0]["path"] == "/v1/chat/completions"
    told = " ".join(message["content"] for message in Endpoint.asked[0]["messages"])
    assert "num_splits: into how many parts" in told and LINE.strip() in told
    start, changed = read(folder / "candidates.jsonl")
    assert start["source"] == guided.START
    assert changed["source"] == guided.START.replace(LINE, CHANGED)
    assert changed["how"] == "proposed by a model" and changed["ratio"] is not None
    assert "| waves" in (folder / "report.md").read_text()
