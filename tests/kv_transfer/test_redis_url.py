"""What may stand in `redis_url`, and what is refused by that name."""

from __future__ import annotations

import pytest

from core.errors import BadRequest
from kv_transfer.redis_url import RedisKind, RedisUrl


@pytest.mark.parametrize(
    ("text", "kind", "hosts"),
    [
        ("redis://h:1/0", RedisKind.SERVER, (("h", 1),)),
        ("rediss://u:p@h/0?ssl_ca_certs=/ca", RedisKind.SERVER, (("h", 6379),)),
        ("unix:///run/redis.sock", RedisKind.SERVER, ()),
        ("redis+sentinel://a:1,b/main", RedisKind.SENTINEL, (("a", 1), ("b", 26379))),
        ("redis+cluster://a,[::1]:7", RedisKind.CLUSTER, (("a", 6379), ("::1", 7))),
    ],
)
def test_servers_sentinels_and_clusters(text: str, kind: RedisKind, hosts: tuple[tuple[str, int], ...]) -> None:
    url = RedisUrl.parse(text)
    assert (url.kind, url.hosts) == (kind, hosts)


def test_login_name_and_tls() -> None:
    url = RedisUrl.parse("rediss+sentinel://us%40er:pass%3Aword@a:1/my-primary?ssl_ca_certs=/ca.crt")
    assert (url.username, url.password, url.name) == ("us@er", "pass:word", "my-primary")
    assert url.tls and url.ca_file == "/ca.crt"
    assert RedisUrl.parse("redis+cluster://:secret@a").username is None


@pytest.mark.parametrize(
    "text",
    [
        "http://h",
        "redis:h",
        "redis://h:port",
        "redis://h:99999",
        "redis+sentinel://a:1",
        "redis+sentinel:///main",
        "redis+cluster://a:1/0",
        "redis+cluster://a:1,,b:2",
        "redis+cluster://a:1?db=3",
    ],
)
def test_what_is_wrong_is_refused_by_its_field_and_never_with_the_password(text: str) -> None:
    with pytest.raises(BadRequest) as refused:
        RedisUrl.parse(text.replace("://", "://user:secret@"))
    assert refused.value.field == "redis_url"
    assert "secret" not in str(refused.value)
