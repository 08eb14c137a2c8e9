"""The OpenAI-compatible HTTP front.

A request's walk: read the body, parse it, prepare, wait for the first delta, and only then send a status. So every
failure before the first token has its own status, and one after it becomes an error frame. A client that leaves
cancels the handler (`build_http_runner` turns that on), which closes the generation, whether or not a byte was sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from core.errors import BadRequest
from core.request import GenerateRequest, PromptLogprobs
from router.front.caller import AUTHORIZATION, SLO_TTFT, TRACEPARENT, Caller, only
from router.front.errors import EdgeError, edge_error, renamed
from router.front.generation import Front, TextDelta
from router.front.intake import MODEL_NOT_FOUND
from router.front.meter import Endpoint, Meter
from router.front.openai_format import DONE_FRAME, ChatShape, CompletionShape, Reply, Shape, frame, model_objects
from router.front.openai_parse import BODY, parse_body
from router.front.openai_schema import Body, ChatBody, CompletionBody
from router.front.readiness import Readiness
from router.front.whole import WholeOutput, best_of

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 1 << 20
BODY_TIMEOUT_S: Final = 30.0
SHUTDOWN_TIMEOUT_S: Final = 1.0  # the dispatcher has drained by then: what is still open is an idle or broken client
REQUEST_ID_HEADER: Final = "x-request-id"
SESSION_ID_HEADER: Final = "X-Session-Id"
REQUEST_ID: Final = web.RequestKey("request_id", str)
STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold tokens back
}


def build_http_app(front: Front, readiness: Readiness) -> web.Application:
    """The application with all its routes; serve it with `build_http_runner`."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_answer_errors_as_json(front)])
    endpoints = OpenAiEndpoints(front, readiness)
    app.router.add_post("/v1/chat/completions", endpoints.chat)
    app.router.add_post("/v1/completions", endpoints.completions)
    app.router.add_get("/v1/models", endpoints.models)
    app.router.add_get("/v1/models/{model:.+}", endpoints.one_model)
    app.router.add_get("/health", endpoints.health)
    app.router.add_get("/livez", endpoints.livez)
    app.router.add_get("/metrics", endpoints.metrics)
    return app


def build_http_runner(app: web.Application) -> web.AppRunner:
    """A runner that cancels a handler when its client leaves, without which work would go on for nobody."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)


class OpenAiEndpoints:
    """The handlers, over one Front."""

    def __init__(self, front: Front, readiness: Readiness) -> None:
        self._front = front
        self._readiness = readiness

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, Endpoint.CHAT, ChatBody, ChatShape())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, Endpoint.COMPLETIONS, CompletionBody, CompletionShape())

    async def models(self, request: web.Request) -> web.Response:
        self._caller(request)
        return web.json_response({"object": "list", "data": list(model_objects(self._front.model).values())})

    async def one_model(self, request: web.Request) -> web.Response:
        self._caller(request)
        name = request.match_info["model"]
        found = model_objects(self._front.model).get(name)
        if found is None:
            return _error_response(404, f"model {name!r} is not served here", MODEL_NOT_FOUND, "model")
        return web.json_response(found)

    async def health(self, _request: web.Request) -> web.Response:
        reason = self._readiness()
        if reason is not None:
            return web.json_response({"status": "unavailable", "reason": reason}, status=503)
        return web.json_response({"status": "ok"})

    async def livez(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics(self, _request: web.Request) -> web.Response:
        text = generate_latest(self._front.metrics.registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _serve(self, http: web.Request, endpoint: Endpoint, kind: type[Body], shape: Shape) -> web.StreamResponse:
        request_id = http[REQUEST_ID]
        with self._front.meter(endpoint, request_id, http.headers.getall(TRACEPARENT, [])) as meter:
            caller = self._caller(http)
            body = parse_body(await _read(http), kind)
            try:
                return await self._answer(http, body, shape, request_id, caller, meter)
            except BadRequest as error:
                raise renamed(error, {**body.field_names(), "session_id": SESSION_ID_HEADER}) from error

    async def _answer(
        self, http: web.Request, body: Body, shape: Shape, request_id: str, caller: Caller, meter: Meter
    ) -> web.StreamResponse:
        draft = replace(
            body.draft(request_id), session_id=only(SESSION_ID_HEADER, http.headers.getall(SESSION_ID_HEADER, [])) or ""
        )
        request = await self._front.prepare(draft, caller)
        created_s = int(self._front.wall_clock())
        reply = Reply(shape, self._front.model, body, self._front.speller, request, created_s)
        async with aclosing(self._front.generate(request, body.placement, meter, caller.max_ttft_s)) as deltas:
            if body.streamed:
                return await self._stream(http, body, request, reply, deltas, meter)
            return await self._whole(body, request, reply, deltas)

    def _caller(self, http: web.Request) -> Caller:
        key, patience = (only(name, http.headers.getall(name, [])) for name in (AUTHORIZATION, SLO_TTFT))
        return self._front.caller(key, patience)

    async def _whole(
        self, body: Body, request: GenerateRequest, reply: Reply, deltas: AsyncGenerator[TextDelta, None]
    ) -> web.Response:
        outputs = [WholeOutput() for _ in range(request.num_choices)]
        scores: PromptLogprobs | None = None
        async for delta in deltas:
            outputs[delta.choice].add(delta)
            scores = scores or delta.prompt_logprobs
            if delta.last:
                best = best_of(outputs, body.num_returned)
                if scores is None:
                    return web.json_response(reply.whole(best, delta.usage))
                # Spelling them may take half a second, which must not hold up every open stream.
                whole = await asyncio.to_thread(reply.whole_json, best, delta.usage, scores)
                return web.json_response(text=whole)
        raise AssertionError("Front.generate ends with a finish reason or an error")

    async def _stream(
        self,
        http: web.Request,
        body: Body,
        request: GenerateRequest,
        reply: Reply,
        deltas: AsyncGenerator[TextDelta, None],
        meter: Meter,
    ) -> web.StreamResponse:
        first = await anext(deltas)
        response = web.StreamResponse(headers={**STREAM_HEADERS, REQUEST_ID_HEADER: request.request_id})
        await response.prepare(http)
        await response.write(reply.opening_frames(first.usage) + reply.delta_frames(first))
        try:
            last = await _write_rest(response, reply, first, deltas)
        except ConnectionError:
            raise  # the client left: nobody reads an error frame
        except Exception as error:
            told = renamed(error, body.field_names()) if isinstance(error, BadRequest) else error
            await response.write(frame(_seen(told).openai_body()) + DONE_FRAME)
            meter.failed(error)
        else:
            await response.write(reply.usage_frames(last.usage) + DONE_FRAME)
        await response.write_eof()
        return response


async def _write_rest(
    response: web.StreamResponse, reply: Reply, first: TextDelta, deltas: AsyncGenerator[TextDelta, None]
) -> TextDelta:
    """Write the deltas after the first one; returns the last."""
    last = first
    async for delta in deltas:
        last = delta
        frames = reply.delta_frames(delta)
        if frames:
            await response.write(frames)
    return last


async def _read(http: web.Request) -> bytes:
    """The body, whatever its content type says."""
    limit = http.client_max_size
    try:
        if http.content_length is not None and http.content_length > limit:
            raise BadRequest(BODY, f"{http.content_length} bytes exceed {limit}")
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await http.read()
    except TimeoutError as error:
        raise BadRequest(BODY, f"did not arrive within {BODY_TIMEOUT_S} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise BadRequest(BODY, f"exceeds {limit} bytes") from error


def _answer_errors_as_json(front: Front) -> Middleware:
    """Middleware: gives each request its id, and each error OpenAI's form."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = front.new_request_id()
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = _error_response(error.status, f"{request.method} {request.path}: {error.reason}", None, None)
        except ConnectionError:
            raise
        except Exception as error:
            seen = _seen(error)
            response = web.json_response(seen.openai_body(), status=seen.http_status, headers=seen.http_headers)
        if not response.prepared:
            response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
        return response

    return middleware


def _seen(error: Exception) -> EdgeError:
    """What the client sees; what is our fault goes to the log with its traceback."""
    seen = edge_error(error)
    if seen.http_status == 500:
        logger.error("request failed", exc_info=error)
    return seen


def _error_response(status: int, message: str, code: str | None, field: str | None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": field, "code": code}}
    return web.json_response(body, status=status)
