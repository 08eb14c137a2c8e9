"""TLS before a server that has none, as the embedded Valkey, and certificates for it by the openssl command."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path


def certificate(folder: Path) -> tuple[Path, Path]:
    """One for 127.0.0.1 that is its own CA, and its key."""
    folder.mkdir()
    file, key = folder / "ca.crt", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
    command += ["-out", str(file), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return file, key


@contextlib.asynccontextmanager
async def tls_before(port: int, tls_port: int, folder: Path) -> AsyncIterator[Path]:
    """What comes in by TLS at `tls_port` goes on to `port`. Gives the file of its CA, which is made in `folder`."""
    file, key = certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, on = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, on), copy(back, writer))

    async with await asyncio.start_server(pass_on, "127.0.0.1", tls_port, ssl=context):
        yield file
