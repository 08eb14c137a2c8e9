"""A router process: both fronts, the registry, and the dispatcher behind them."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from aiohttp import web
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry
from tandem.v1 import worker_pb2_grpc

from engine.digest import read_adapters, weights_digest
from engine.model_config import ModelConfig
from engine.tokenizer import Tokenizer
from router.admission.policy import Band
from router.config import RouterConfig, RouterEndpoints
from router.front.generation import Front
from router.front.grammar_gate import GrammarGate
from router.front.grpc_service import SERVER_OPTIONS, GrpcFront, build_grpc_server
from router.front.intake import ServedModel
from router.front.openai_http import build_http_app, build_http_runner
from router.live import LiveDispatcher
from router.policy_file import Policy, follow_policy, read_policy
from router.registry_service import SERVICE_NAME, RegistryServicer
from telemetry.open_tracer import close_tracer, open_tracer
from telemetry.router_metrics import PolicyMetrics, RouterMetrics, RouterStateCollector, RoutingMetrics
from telemetry.slo_metrics import SloTargets
from telemetry.tasks import BackgroundTasks, end_broken

if TYPE_CHECKING:  # it loads OpenTelemetry
    from telemetry.tracing import Tracer


class RouterProcess:
    """Started once, stopped once."""

    def __init__(self) -> None:
        self._dispatcher: LiveDispatcher | None = None
        self._grpc: GrpcFront | None = None
        self._registry: grpc.aio.Server | None = None
        self._http: web.AppRunner | None = None
        self._grammars: GrammarGate | None = None
        self._tracer: Tracer | None = None
        self._tasks = BackgroundTasks(end_broken)  # by what no request explains: its books may be wrong
        self._drain_timeout_s = 0.0

    async def start(self, config: RouterConfig) -> RouterEndpoints:
        """Listen for clients and workers.

        Raises: OSError: an address is taken. BadModel: no folder to serve from. BadRequest: the policy file is wrong.
        """
        self._drain_timeout_s = config.drain_timeout_s
        registry = CollectorRegistry()
        routing = RoutingMetrics(registry)
        router_id = f"router-{secrets.token_hex(4)}"
        self._tracer = open_tracer(config.trace_endpoint, config.trace_ratio, "tandem-router", router_id, registry)
        dispatcher = LiveDispatcher(config, router_id, self._tasks.spawn, routing, self._tracer)
        self._dispatcher = dispatcher
        registry.register(RouterStateCollector(dispatcher.state, config.model_name))
        tokenizer = Tokenizer.load(config.model_folder)
        model = _served_model(config, tokenizer)
        slo = SloTargets(config.slo_ttft_s, config.slo_itl_s)
        metrics = RouterMetrics(registry, config.model_name, slo, tuple(Band))
        self._grammars = GrammarGate(config.model_folder, model.vocab_size)
        self._tasks.spawn(self._grammars.start())
        front = Front(dispatcher, tokenizer, model, metrics, self._grammars.check, tracer=self._tracer)
        if config.policy_file is not None:
            self._follow(config.policy_file, dispatcher, front, PolicyMetrics(registry))
        grpc_address = await self._start_grpc(config, dispatcher, front)
        http_address = await self._start_http(config, dispatcher, front)
        registry_address = await self._start_registry(config, dispatcher)
        assert self._grpc is not None
        self._tasks.spawn(dispatcher.tick_forever())
        self._tasks.spawn(self._grpc.health.follow())
        return RouterEndpoints(http_address, grpc_address, registry_address)

    async def stop(self) -> None:
        """Refuse what is new, let what is open finish within the drain bound, close everything."""
        if self._grpc is not None:
            await self._grpc.health.enter_graceful_shutdown()
        if self._dispatcher is not None:
            await self._dispatcher.close(self._drain_timeout_s)
        self._tasks.cancel()
        if self._grammars is not None:
            await self._grammars.close()
        if self._http is not None:
            await self._http.cleanup()
        if self._grpc is not None:
            await self._grpc.server.stop(grace=0.5)
        if self._registry is not None:
            await self._registry.stop(grace=0.5)
        await close_tracer(self._tracer)

    def _follow(self, file: Path, dispatcher: LiveDispatcher, front: Front, metrics: PolicyMetrics) -> None:
        def apply(policy: Policy) -> None:
            front.apply(policy.admission)
            dispatcher.apply(policy)

        apply(read_policy(file))  # before anybody is served by another one
        self._tasks.spawn(follow_policy(file, apply, metrics))

    async def _start_grpc(self, config: RouterConfig, dispatcher: LiveDispatcher, front: Front) -> str:
        self._grpc = build_grpc_server(front, dispatcher.why_not_ready)
        port = self._grpc.server.add_insecure_port(f"{config.grpc_host}:{config.grpc_port}")
        await self._grpc.server.start()
        return f"{config.grpc_host}:{port}"

    async def _start_registry(self, config: RouterConfig, dispatcher: LiveDispatcher) -> str:
        self._registry = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_RouterServiceServicer_to_server(RegistryServicer(dispatcher), self._registry)
        reflection.enable_server_reflection((SERVICE_NAME, reflection.SERVICE_NAME), self._registry)
        port = self._registry.add_insecure_port(f"{config.registry_host}:{config.registry_port}")
        await self._registry.start()
        return f"{config.registry_host}:{port}"

    async def _start_http(self, config: RouterConfig, dispatcher: LiveDispatcher, front: Front) -> str:
        self._http = build_http_runner(build_http_app(front, dispatcher.why_not_ready))
        await self._http.setup()
        site = web.TCPSite(self._http, config.http_host, config.http_port)
        await site.start()
        port = self._http.addresses[0][1]
        return f"{config.http_host}:{port}"


def _served_model(config: RouterConfig, tokenizer: Tokenizer) -> ServedModel:
    model = ModelConfig.load(config.model_folder)
    return ServedModel(
        name=config.model_name,
        created_s=int(time.time()),
        max_context_tokens=min(model.max_context_tokens, config.max_context_tokens or model.max_context_tokens),
        vocab_size=model.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        weights_digest=weights_digest(config.model_folder),
        adapters=read_adapters(config.adapters),
    )
