"""What any router in Python costs at least: `python -m bench.router.floor_server PORT` answers each prompt with one SSE
chunk, at once."""

from __future__ import annotations

import json
import sys

from aiohttp import web

CHUNK = {"choices": [{"index": 0, "text": " a", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
EVENTS = b"data: " + json.dumps(CHUNK).encode() + b"\n\ndata: [DONE]\n\n"


async def complete(request: web.Request) -> web.StreamResponse:
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(EVENTS)
    await response.write_eof()
    return response


def main(port: int) -> None:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", complete)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]))
