"""`tandem chat`: talk to a running cluster over its OpenAI-compatible HTTP front."""

from __future__ import annotations

import argparse
import http.client
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final

from cluster.api_key import VARIABLE, key_headers, refusal
from core.errors import BadRequest, CommandFailed

TIMEOUT_S: Final = 120.0  # between two pieces of an answer
MAX_REFUSAL_BYTES: Final = 2000

Message = dict[str, str]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `chat`."""
    text = "talk to a running cluster"
    parser = commands.add_parser(
        "chat",
        help=text,
        description=f"{text.capitalize()}. Without --message: line by line, until an empty line. {VARIABLE} in the "
        "environment is the key, where one is needed.",
    )
    parser.add_argument("--message", metavar="TEXT", help="ask this one thing, print the answer, end")
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: the model's own)")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the HTTP front (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="the served model (default: the first that the front names)")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """One answer, or a conversation."""
    model = arguments.model or _first_model(arguments.url)
    history: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    if arguments.message is not None:
        _turn(arguments, model, history, arguments.message)
        return 0
    print(f"{model} at {arguments.url}; an empty line ends.")
    while text := _read_line():
        _turn(arguments, model, history, text)
    return 0


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _turn(arguments: argparse.Namespace, model: str, history: list[Message], text: str) -> None:
    """Ask, print the answer while it comes, remember both."""
    history.append({"role": "user", "content": text})
    body = {
        "model": model,
        "messages": history,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "stream": True,
    }
    pieces: list[str] = []
    for piece in stream_chat(arguments.url, body):
        pieces.append(piece)
        print(piece, end="", flush=True)
    print()
    history.append({"role": "assistant", "content": "".join(pieces)})


def stream_chat(url: str, body: dict[str, Any]) -> Iterator[str]:
    """Pieces of the answer's text. Raises: CommandFailed, with the front's own message."""
    with _Reply(url, "POST", "/v1/chat/completions", body) as reply:
        for line in reply.lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                return
            if data:
                yield _text_of(json.loads(data))
    raise CommandFailed("the answer broke off")


def _text_of(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise CommandFailed(str(chunk["error"].get("message", chunk["error"])))
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _first_model(url: str) -> str:
    with _Reply(url, "GET", "/v1/models", None) as reply:
        return str(json.loads("".join(reply.lines()))["data"][0]["id"])


def _parts(url: str) -> tuple[bool, str, int | None, str]:
    """Whether by TLS, host, port and path; a last /v1, as in OpenAI's base_url, is ours to add. Raises: BadRequest."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BadRequest("--url", f"{url}: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise BadRequest("--url", f"must be http://HOST:PORT, got {url!r}")
    return parts.scheme == "https", host, port, parts.path.rstrip("/").removesuffix("/v1")


class _Reply:
    """One HTTP exchange by the standard library alone: no proxy from the environment, and quick to import."""

    def __init__(self, url: str, method: str, path: str, body: dict[str, Any] | None) -> None:
        secure, host, port, folder = _parts(url)
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(host, port, timeout=TIMEOUT_S)
        self._request = (method, folder + path, json.dumps(body) if body is not None else None)
        self._url = url

    def __enter__(self) -> _Reply:
        method, path, body = self._request
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            self._connection.request(method, path, body, {**headers, **key_headers()})
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise CommandFailed(f"{self._url}: {error}") from None
        if self._response.status != 200:
            text = self._response.read(MAX_REFUSAL_BYTES).decode(errors="replace")
            raise CommandFailed(refusal(self._response.status, text))
        return self

    def lines(self) -> Iterator[str]:
        """The body's lines, while they come."""
        try:
            for line in self._response:
                yield line.decode()
        except (OSError, http.client.HTTPException) as error:
            raise CommandFailed(f"the answer broke off: {error}") from None

    def __exit__(self, *_: object) -> None:
        self._connection.close()
