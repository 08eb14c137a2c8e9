"""One exchange with the HTTP front, by the standard library alone: no proxy of the environment, and quick to import."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final

from cluster.api_key import key_headers, refusal
from cluster.wrong_port import meant
from core.errors import BadRequest, CommandFailed

TIMEOUT_S: Final = 120.0  # between two pieces of an answer
MAX_REFUSAL_BYTES: Final = 2000
NOT_TLS: Final = "WRONG_VERSION_NUMBER"  # as ssl.SSLError has it
HTTP2_FRAME: Final = "\0\0"  # how a server's first frame begins, read as HTTP/1


class HttpReply:
    """A context. Raises: BadRequest: `url` is none. CommandFailed: no answer, or a refusal, by the front's message."""

    def __init__(self, url: str, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        secure, host, self._port, folder = _parts(url)
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(host, self._port, timeout=TIMEOUT_S)
        self._request = (method, folder + path, json.dumps(body) if body is not None else None)
        self._url = url

    def __enter__(self) -> HttpReply:
        try:
            self._ask()
        except CommandFailed:
            self._connection.close()
            raise
        return self

    def _ask(self) -> None:
        method, path, body = self._request
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            self._connection.request(method, path, body, {**headers, **key_headers()})
            self._response = self._connection.getresponse()
        except http.client.RemoteDisconnected as error:
            raise self.stranger("closes the connection without an answer") from error
        except http.client.BadStatusLine as error:
            what = "speaks HTTP/2, as gRPC does, and not HTTP/1" if HTTP2_FRAME in str(error) else "does not speak HTTP"
            raise self.stranger(what) from error
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "reason", "") == NOT_TLS:
                raise self.stranger("does not speak TLS, http:// may be meant") from error
            raise CommandFailed(f"{self._url}: {error}") from error
        if self._response.status != 200:
            text = self._response.read(MAX_REFUSAL_BYTES).decode(errors="replace")
            raise CommandFailed(refusal(self._response.status, text))

    def lines(self) -> Iterator[str]:
        """The body's lines, while they come."""
        try:
            for line in self._response:
                yield line.decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise CommandFailed(f"the answer broke off: {error}") from error

    def stranger(self, what: str) -> CommandFailed:
        """The error to raise where nothing of ours answers."""
        return CommandFailed(f"{self._url} {what}: {meant(self._port, 'http_port')}")

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def first_model(url: str) -> dict[str, Any]:
    """What the front says of the model that it names first. Raises: as HttpReply."""
    with HttpReply(url, "GET", "/v1/models") as reply:
        text = "".join(reply.lines())
        try:
            model = json.loads(text)["data"][0]
            return {**model, "id": str(model["id"])}
        except (ValueError, LookupError, TypeError) as error:
            raise reply.stranger("speaks HTTP, but is no front of Tandem's") from error


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
