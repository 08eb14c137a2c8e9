"""Where a Redis or Valkey is: one server, the primary that Sentinels know, or a Cluster.

    redis://host:port/db                              one server; rediss:// with TLS, unix:///path by a socket
    redis+sentinel://host:port,host:port/NAME         the primary NAME; hosts are Sentinels
    redis+cluster://host:port,host:port               a Cluster, found through any of its nodes
`user:password@` may stand before the hosts. rediss+sentinel:// and rediss+cluster:// use TLS, and take
`?ssl_ca_certs=FILE` as rediss:// does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from core.errors import BadRequest


class RedisKind(StrEnum):
    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


FIELD: Final = "redis_url"  # what a complaint names
SCHEMES: Final = {
    "redis": RedisKind.SERVER,
    "rediss": RedisKind.SERVER,
    "unix": RedisKind.SERVER,
    "redis+sentinel": RedisKind.SENTINEL,
    "rediss+sentinel": RedisKind.SENTINEL,
    "redis+cluster": RedisKind.CLUSTER,
    "rediss+cluster": RedisKind.CLUSTER,
}
DEFAULT_PORTS: Final = {RedisKind.SERVER: 6379, RedisKind.SENTINEL: 26379, RedisKind.CLUSTER: 6379}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """hosts: (host, port), none of a socket. name: of the primary, for Sentinels."""

    text: str
    kind: RedisKind
    hosts: tuple[tuple[str, int], ...]
    name: str
    username: str | None
    password: str | None
    tls: bool
    ca_file: str | None

    @staticmethod
    def parse(text: str) -> RedisUrl:
        """Raises: BadRequest: on `redis_url`; what it says never holds the password."""
        scheme, found, _rest = text.partition("://")
        kind = SCHEMES.get(scheme)
        if not found or kind is None:
            raise BadRequest(FIELD, f"must start with one of {', '.join(f'{name}://' for name in SCHEMES)}")
        parts = urlsplit(text)
        login, _, hosts = parts.netloc.rpartition("@")
        username, _, password = login.partition(":")
        query = dict(parse_qsl(parts.query))
        url = RedisUrl(
            text,
            kind,
            tuple(_host(part, DEFAULT_PORTS[kind]) for part in hosts.split(",")) if scheme != "unix" else (),
            unquote(parts.path.strip("/")),
            unquote(username) or None,
            unquote(password) or None,
            scheme.startswith("rediss"),
            query.get("ssl_ca_certs"),
        )
        if kind is RedisKind.SENTINEL and not url.name:
            raise BadRequest(FIELD, "must end in the primary's name, as the Sentinels know it: /NAME")
        if kind is RedisKind.CLUSTER and url.name:
            raise BadRequest(FIELD, "a Cluster has one database: nothing may follow its hosts")
        if kind is not RedisKind.SERVER and set(query) - {"ssl_ca_certs"}:
            raise BadRequest(FIELD, f"unknown parameters: {', '.join(sorted(set(query) - {'ssl_ca_certs'}))}")
        return url


def _host(part: str, default_port: int) -> tuple[str, int]:
    try:
        one = urlsplit(f"//{part}")
        host, port = one.hostname, one.port
    except ValueError as error:
        raise BadRequest(FIELD, f"host {part!r}: {error}") from error
    if not host:
        raise BadRequest(FIELD, "must name its hosts: host:port,host:port")
    return host, default_port if port is None else port
