"""The `tandem` command's face: help, tables, streams and exit codes."""

from __future__ import annotations

import json
import socket
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import grpc
import pytest
import yaml
from any_ports import ANY_PORTS
from tandem.v1 import worker_pb2

from cluster.commands import up
from cluster.commands.model import ready_folder
from cluster.commands.status import table
from cluster.config import ClusterConfig
from cluster.fleet import DrainRefused, RefusalReason
from cluster.main import main
from cluster.progress import Progress
from cluster.wrong_port import meant
from engine.model_config import ModelConfig
from tests.engine.gguf_files import TOKENS, model_fields, tokenizer_fields, write_gguf
from tests.engine.tiny_model import tiny_tensors


class ChatHandler(BaseHTTPRequestHandler):
    """Answers with the words of the last message, one chunk each; "fail" breaks off with an error."""

    def do_GET(self) -> None:
        is_front = self.path == "/v1/models"
        self._send("application/json", json.dumps({"data": [{"id": "tiny"}]}) if is_front else "# HELP elsewhere")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        if text == "refuse":
            self.send_error(503)
        elif text == "who?":
            self.send_response(401)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": "an API key is needed"}}).encode())
        elif text == "fail":
            self._send("text/event-stream", 'data: {"error": {"message": "worker lost"}}\n\n')
        elif text == "gibberish":
            self._send("text/event-stream", "data: gibberish\n\n")
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


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["up"],
        ["router"],
        ["controller"],
        ["chat"],
        ["status"],
        ["role"],
        ["drain"],
        ["drill"],
        ["model"],
        ["model", "fetch"],
    ],
)
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


def test_chat_says_where_its_key_comes_from(
    chat_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    said = "tandem: HTTP 401: an API key is needed; TANDEM_API_KEY in the environment is"
    for end in ("not set", "another one"):
        assert main(["chat", "--url", chat_url, "--message", "who?"]) == 1
        assert capsys.readouterr().err == f"{said} {end}\n"
        monkeypatch.setenv("TANDEM_API_KEY", "sesame")


@pytest.fixture(scope="module")
def grpc_address() -> Iterator[str]:
    """Of a server that offers nothing."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture(scope="module")
def text_address() -> Iterator[str]:
    """Of a server that says something else, as Redis does, and closes."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1000)
            self.request.sendall(b"-ERR unknown command\r\n")

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_chat_and_drill_say_what_listens_where_no_http_front_does(
    chat_url: str, grpc_address: str, text_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = "the HTTP front is wanted, 8000 by default\n"
    for url, what in (
        (f"http://{grpc_address}", "speaks HTTP/2, as gRPC does, and not HTTP/1"),
        (f"http://{text_address}", "does not speak HTTP"),
        (f"{chat_url}/elsewhere", "speaks HTTP, but is no front of Tandem's"),
        (chat_url.replace("http", "https"), "does not speak TLS, http:// may be meant"),
    ):
        assert main(["chat", "--url", url, "--message", "x"]) == 1
        assert capsys.readouterr().err == f"tandem: {url} {what}: {wanted}"
    assert main(["chat", "--url", chat_url, "--message", "gibberish"]) == 1
    assert capsys.readouterr().err.startswith(f"tandem: {chat_url} answers what is no chunk of a chat, 'gibberish': ")
    assert main(["drill", "--yes", "--url", f"http://{grpc_address}"]) == 1
    assert (
        capsys.readouterr().err
        == f"tandem: http://{grpc_address} speaks HTTP/2, as gRPC does, and not HTTP/1: {wanted}"
    )


def test_who_asks_for_registry_or_controller_elsewhere_is_told_so(
    chat_url: str, grpc_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    http_address = chat_url.removeprefix("http://")
    for command, there in (
        (["status", "--registry"], "the registry is wanted, 50052 by default"),
        (["drain", "decode-0", "--controller"], "the controller is wanted, 50053 by default"),
    ):
        for address, what in ((http_address, "does not speak gRPC"), (grpc_address, "speaks gRPC, but is not the")):
            assert main([*command, address]) == 1
            said = capsys.readouterr().err
            assert f"at {address}: {what}" in said and said.endswith(f": {there}\n")


@pytest.mark.parametrize(
    ("port", "wanted", "said"),
    [
        (50051, "http_port", "50051 is the gRPC front by default, 8000 the HTTP front"),
        (50062, "http_port", "50062 is the registry by default, 8010 the HTTP front"),
        (8010, "registry_port", "8010 is the HTTP front by default, 50062 the registry"),
        (50053, "registry_port", "50053 is the controller by default, 50052 the registry"),
        (50063, "registry_port", "the registry is wanted, 50052 by default"),  # there is one controller
        (8010, "controller_port", "8010 is the HTTP front by default, 50053 the controller"),
        (8000, "http_port", "the HTTP front is wanted, 8000 by default"),
        (None, "http_port", "the HTTP front is wanted, 8000 by default"),
    ],
)
def test_a_default_port_is_known_by_its_number(port: int | None, wanted: str, said: str) -> None:
    assert meant(port, wanted) == said


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "http://a:1,http://b:2", "http://a:port", "ftp://a"])
def test_a_url_that_is_none_is_refused_by_its_flag(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url, "--message", "x"]) == 2
    assert "--url" in capsys.readouterr().err


def test_the_url_of_openai_clients_does_too(chat_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", f"{chat_url}/v1", "--model", "m", "--message", "hello"]) == 0
    assert capsys.readouterr().out


def test_nobody_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--message", "x"]) == 1
    assert main(["status", "--registry", "127.0.0.1:9"]) == 1
    assert main(["role", "decode-0", "prefill", "--controller", "127.0.0.1:9"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--num-blocks", "0"], "--num-blocks: must be in"),
        (["--prefill", "1", "--aggregated"], "--prefill: an aggregated cluster"),
        (["--config", "/nonexistent.yaml"], "--config: /nonexistent.yaml cannot be read"),
        (["--model", "/nonexistent"], "--model: /nonexistent does not exist"),
        (["--policy", "/nonexistent"], "--policy: /nonexistent: "),
        (["--adapter", "poet=/nonexistent"], "--adapter: /nonexistent"),
    ],
)
def test_wrong_use_is_exit_code_2_and_names_the_setting(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *ANY_PORTS, *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_port_in_use_is_named_with_its_flag_before_anything_starts(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["up", *ANY_PORTS, flag, str(port)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"tandem: {flag}: port {port} on 127.0.0.1 ({flag}) is in use")
    assert not said.out and not (tmp_path / "cache").exists()


def test_a_flag_that_is_cut_short_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--prefil", "2"])
    assert "unrecognized arguments: --prefil" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(no_folder))
    assert main(["model", "fetch"]) == 1
    assert str(no_folder) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["status", "--registry", "127.0.0.1"], "--registry: must be host:port"),
        (["controller"], "ray_address"),
        (["controller", "--ray-address", "head"], "--ray-address: must be host:port"),
        (["controller", "--ray-address", "head:6379", "--registry-port", "0"], "--registry-port"),
        (
            ["router", "--http-port", "0", "--grpc-port", "0", "--registry-port", "0", "--model", "/nonexistent"],
            "--model",
        ),
    ],
)
def test_what_a_host_is_not_told_is_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert named in capsys.readouterr().err


def test_a_refusal_names_what_the_value_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag goes before a variable, that before the file; what none of them says keeps its name."""
    file = tmp_path / "cluster.yaml"
    given = ["up", *ANY_PORTS, "--config", str(file)]

    def refusal(*flags: str) -> str:
        assert main([*given, *flags]) == 2
        return capsys.readouterr().err

    file.write_text("num_blocks: 0\n")
    assert refusal().startswith(f"tandem: num_blocks in {file}: must be in")
    monkeypatch.setenv("TANDEM_NUM_BLOCKS", "0")
    assert refusal().startswith("tandem: TANDEM_NUM_BLOCKS: must be in")
    assert refusal("--num-blocks", "-1").startswith("tandem: --num-blocks: must be in")
    monkeypatch.delenv("TANDEM_NUM_BLOCKS")
    file.write_text("num_blok: 64\n")
    assert refusal() == f"tandem: num_blok in {file}: is not a setting; num_blocks is one\n"
    monkeypatch.setenv("TANDEM_POLICY_FILE", str(tmp_path / "none"))
    file.write_text("{}\n")
    assert refusal().startswith(f"tandem: TANDEM_POLICY_FILE: {tmp_path / 'none'}: ")
    assert main(["controller"]) == 2
    assert capsys.readouterr().err.startswith("tandem: ray_address: must be set")


def test_a_variable_that_nothing_reads_is_said_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_NUM_BLOKS", "64")
    monkeypatch.setenv("TANDEM_OF_ANOTHER", "x")
    monkeypatch.setenv("TANDEM_API_KEY", "sesame")
    assert main(["controller"]) == 2  # which lacks the address of a Ray
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].endswith(": TANDEM_NUM_BLOKS (TANDEM_NUM_BLOCKS?), TANDEM_OF_ANOTHER")
    monkeypatch.delenv("TANDEM_NUM_BLOKS")
    monkeypatch.delenv("TANDEM_OF_ANOTHER")
    assert main(["controller"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_version_is_that_of_the_project_and_the_chart(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    root = Path(__file__).parents[2]
    number = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"tandem {number}\n"
    chart = yaml.safe_load((root / "deploy/helm/tandem/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == number


@pytest.mark.parametrize("command", [["drain", "decode-0"], ["role", "decode-0", "prefill"]])
def test_force_is_named_where_it_helps(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise DrainRefused(reason, "no")

    monkeypatch.setattr("cluster.controller_client.drain_worker", refuse)
    reason = RefusalReason.LAST_DECODE_WORKER
    assert main(command) == 1
    assert capsys.readouterr().err == "tandem: no (--force does it all the same)\n"
    reason = RefusalReason.BUSY
    assert main(command) == 1
    assert capsys.readouterr().err == "tandem: no\n"


def test_status_is_a_table() -> None:
    ref = worker_pb2.WorkerRef(worker_id="prefill-0", incarnation="1")
    peer = worker_pb2.PeerConnected(peer=worker_pb2.WorkerRef(worker_id="decode-0"), lane="cma", probe_gbps=5.25)
    item = worker_pb2.WorkerStatus(
        worker=worker_pb2.WorkerInfo(
            ref=ref, role=worker_pb2.ROLE_PREFILL, address="127.0.0.1:1", metrics_address="127.0.0.1:2"
        ),
        life="ready",
        load=worker_pb2.WorkerLoad(running_requests=1, used_blocks=2, free_blocks=3),
        peers=[peer],
    )
    status = worker_pb2.GetStatusResponse(workers=[item], open_requests=1)
    lines = table({"127.0.0.1:1": status}).splitlines()
    assert lines[0].split()[:5] == ["WORKER", "ROLE", "LIFE", "ADDRESS", "METRICS"]
    assert lines[1].split()[:5] == ["prefill-0", "prefill", "ready", "127.0.0.1:1", "127.0.0.1:2"]
    assert "decode-0 (cma, 5.2 GB/s)" in lines[1]
    assert lines[2:] == ["open requests: 1, queued: 0"]
    young = worker_pb2.GetStatusResponse(workers=[worker_pb2.WorkerStatus(worker=item.worker, life="starting")])
    several = table({"127.0.0.1:1": status, "127.0.0.1:2": young, "127.0.0.1:3": None}).splitlines()
    assert several[:2] == lines[:2]
    assert several[2:] == [
        "router 127.0.0.1:1: ready workers: 1 of 1, open requests: 1, queued: 0",
        "router 127.0.0.1:2: ready workers: 0 of 1, open requests: 0, queued: 0",
        "router 127.0.0.1:3: does not answer",
    ]


def test_model_fetch_leaves_a_ready_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["model", "fetch", "--to", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def _tiny_gguf(path: Path) -> Path:
    sizes = {"vocab_size": len(TOKENS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = sizes | {"num_attention_heads": 4, "num_key_value_heads": 2}
    fields = model_fields("llama", config | {"max_position_embeddings": 128, "rms_norm_eps": 1e-5}) | tokenizer_fields()
    return write_gguf(path, "llama", fields, tiny_tensors(config, seed=0))


def test_up_imports_a_gguf_once_and_serves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[ClusterConfig] = []
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # `up` leaves it
    monkeypatch.setattr(up, "supervise", lambda serve: serve())
    monkeypatch.setattr(up, "_serve", lambda config, *_: served.append(config) or 0)
    source = _tiny_gguf(tmp_path / "tiny.gguf")
    assert main(["up", *ANY_PORTS, "--model", str(source)]) == 0
    assert "reading tiny.gguf" in capsys.readouterr().out
    (config,) = served
    assert config.served_model_name == "tiny"
    assert config.model_folder.is_relative_to(tmp_path / "cache" / "models")
    assert ModelConfig.load(config.model_folder).num_heads == 4
    assert ready_folder(source, Progress()) == config.model_folder
    assert "reading" not in capsys.readouterr().out


def test_a_file_that_is_no_gguf_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    source = _tiny_gguf(tmp_path / "tiny.gguf")
    for size, said in (
        (100, f"{source}: cannot be read as GGUF: damaged, or not all"),
        (3, f"{source} is a file, but"),
    ):
        source.write_bytes(source.read_bytes()[:size])
        assert main(["up", *ANY_PORTS, "--model", str(source)]) == 2
        assert f"tandem: --model: {said}" in capsys.readouterr().err
    assert main(["model", "export", str(tmp_path / "out"), "--model", str(source)]) == 2
    assert f"tandem: --model: {said}" in capsys.readouterr().err
