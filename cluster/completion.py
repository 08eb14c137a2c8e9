"""A greedy completion over HTTP, as the self check and the drill ask for it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import aiohttp

from cluster.api_key import refusal
from core.errors import CommandFailed

PROMPT: Final = "The capital of France is"


@asynccontextmanager
async def completion(
    session: aiohttp.ClientSession,
    http_url: str,
    model: str,
    prompt: str,
    prefill: str,
    max_tokens: int,
    *,
    stream: bool = False,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Its answer, to be read. Its own salt keeps every prefix cache out of it.

    Raises: CommandFailed: it was refused, or broke off, also in what is done with it.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "return_token_ids": True,
        "cache_salt": secrets.token_hex(8),
        "tandem": {"prefill": prefill},
    }
    try:
        async with session.post(f"{http_url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise CommandFailed(f"{prefill} prefill: {refusal(response.status, await response.text())}")
            yield response
    except (aiohttp.ClientError, TimeoutError) as error:
        raise CommandFailed(f"{prefill} prefill: {type(error).__name__}: {error}") from error
