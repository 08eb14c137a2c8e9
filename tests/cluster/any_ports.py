"""Flags of `tandem up` for tests that must not meet the default ports of a cluster beside them."""

from __future__ import annotations

ANY_PORTS = [item for name in ("http", "grpc", "registry", "controller") for item in (f"--{name}-port", "0")]
