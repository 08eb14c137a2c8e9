"""The `tandem` command's face: help, tables, streams and exit codes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tandem.v1 import worker_pb2

from cluster.commands.status import table
from cluster.main import main


class ChatHandler(BaseHTTPRequestHandler):
    """Answers with the words of the last message, one chunk each; "fail" breaks off with an error."""

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        if text == "refuse":
            self.send_error(503)
        elif text == "fail":
            self._send("text/event-stream", 'data: {"error": {"message": "worker lost"}}\n\n')
        else:
            chunks = [{"choices": [{"delta": {"content": f"{word} "}}]} for word in [body["model"], *text.split()]]
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in [{"choices": [{"delta": {}}]}, *chunks]]
            self._send("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]))

    def _send(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def chat_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), ChatHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("arguments", [[], ["up"], ["chat"], ["status"], ["model"], ["model", "fetch"]])
def test_each_command_explains_itself(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("usage: tandem")


def test_chat_streams_one_answer(chat_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", chat_url, "--message", "one two"]) == 0
    assert capsys.readouterr().out == "tiny one two \n"


def test_chat_keeps_the_conversation(
    chat_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "again", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["chat", "--url", chat_url, "--model", "m"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["m hello ", "m again "]


@pytest.mark.parametrize(("message", "error"), [("fail", "worker lost"), ("refuse", "HTTP 503")])
def test_chat_shows_the_fronts_error(
    chat_url: str, capsys: pytest.CaptureFixture[str], message: str, error: str
) -> None:
    assert main(["chat", "--url", chat_url, "--message", message]) == 1
    assert error in capsys.readouterr().err


def test_nobody_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--message", "x"]) == 1
    assert main(["status", "--registry", "127.0.0.1:9"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--num-blocks", "0"], "num_blocks"),
        (["--prefill", "1", "--aggregated"], "num_prefill"),
        (["--config", "/nonexistent.yaml"], "config"),
        (["--model", "/nonexistent"], "--model"),
    ],
)
def test_wrong_use_is_exit_code_2_and_names_the_setting(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--http-port", "0", "--grpc-port", "0", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_status_is_a_table() -> None:
    ref = worker_pb2.WorkerRef(worker_id="prefill-0", incarnation="1")
    peer = worker_pb2.PeerConnected(peer=worker_pb2.WorkerRef(worker_id="decode-0"), lane="cma", probe_gbps=5.25)
    item = worker_pb2.WorkerStatus(
        worker=worker_pb2.WorkerInfo(ref=ref, role=worker_pb2.ROLE_PREFILL, address="127.0.0.1:1"),
        life="ready",
        load=worker_pb2.WorkerLoad(running_requests=1, used_blocks=2, free_blocks=3),
        peers=[peer],
    )
    lines = table(worker_pb2.GetStatusResponse(workers=[item], open_requests=1)).splitlines()
    assert lines[0].split()[:4] == ["WORKER", "ROLE", "LIFE", "ADDRESS"]
    assert "decode-0 (cma, 5.2 GB/s)" in lines[1]
    assert lines[2] == "open requests: 1, queued: 0"


def test_model_fetch_leaves_a_ready_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["model", "fetch", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
