"""`tandem chat`: talk to a running cluster over its OpenAI-compatible HTTP front."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from cluster.api_key import VARIABLE
from cluster.commands import flags
from cluster.http_reply import HttpReply, first_model
from core.errors import CommandFailed

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
    flags.add_url(parser)
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
    model = arguments.model or first_model(arguments.url)["id"]
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
    with HttpReply(url, "POST", "/v1/chat/completions", body) as reply:
        for line in reply.lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data == "[DONE]":
                return
            if data:
                yield _text_of(data, reply)
    raise CommandFailed("the answer broke off")


def _text_of(data: str, reply: HttpReply) -> str:
    try:
        chunk = json.loads(data)
        if "error" not in chunk:
            return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        message = str(chunk["error"].get("message", chunk["error"]))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise reply.stranger(f"answers what is no chunk of a chat, {data[:100]!r}") from error
    raise CommandFailed(message)
