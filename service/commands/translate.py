"""``kvt translate``: one request in a file, its answer in another, without a server."""

import asyncio
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from service.commands.exits import Code, Failure
from service.commands.options import Config, Device

if TYPE_CHECKING:
    from service.settings import Settings
    from service.state import Service

_CHUNK_BYTES = 1 << 20
_CODES = {
    "identity_mismatch": Code.IDENTITY,
    "pair_not_found": Code.IDENTITY,
    "unsupported_model": Code.IDENTITY,
    "mapper_not_ready": Code.ARTIFACT,
}


def translate(
    request: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="The body of POST /translate.")
    ],
    answer: Annotated[Path, typer.Argument(dir_okay=False, help="Where the target's cache goes.")],
    artifact: Annotated[
        list[Path], typer.Option(exists=True, file_okay=False, help="Mapper folders.")
    ],
    config: Config = None,
    max_kl: Annotated[float | None, typer.Option(help="Threshold, nats a token.")] = None,
    device: Device = "cpu",
    allow_unproven: Annotated[
        bool, typer.Option(help="Use a mapper without evidence; the answer says so.")
    ] = False,
) -> None:
    """Translate a cache from file to file, through all that a server would do and check.

    REQUEST is safetensors with the request document under `kvt` in its metadata. The answer is
    written only when it is complete; a re-prefill decision ends with exit code 10.
    """
    from service.commands.serve import settings_from

    del config
    given = {"device": device, "allow_unproven": allow_unproven, "max_kl": max_kl}
    settings = settings_from(
        artifacts=artifact,
        log_level="error",
        state=None,  # which may be a server's,
        buffers=None,  # and so may this,
        shadow_rate=0,  # and nobody could report to a process that has ended
        **{name: value for name, value in given.items() if value is not None},
    )
    part = answer.with_name(f".{answer.name}.part")
    try:
        with request.open("rb") as source, part.open("wb") as out:
            exchange = asyncio.run(_exchange(settings, source, out))
        typer.echo(exchange.summary())
        part.replace(answer)
    finally:
        part.unlink(missing_ok=True)


class Exchange:
    """The two ends of one ASGI request: a file to read the body from, a file for the answer's."""

    def __init__(self, source: BinaryIO, out: BinaryIO) -> None:
        self._source, self._out = source, out
        self._left = os.fstat(source.fileno()).st_size
        self._document = bytearray()
        self._written_bytes = 0
        self._sent = False
        self.status, self.headers = 0, dict[str, str]()
        self.complete = False

    @property
    def scope(self) -> dict[str, Any]:
        """What the application is told of the request."""
        headers = {"content-type": "application/vnd.safetensors", "content-length": str(self._left)}
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/translate",
            "raw_path": b"/translate",
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": None,
            "server": None,
        }

    async def receive(self) -> MutableMapping[str, Any]:
        """The next chunk; after the last, nothing for ever, as from a client that waits."""
        if self._sent:
            await asyncio.Event().wait()
        chunk = self._source.read(_CHUNK_BYTES)
        self._left -= len(chunk)
        # A file that shrinks while it is read ends the body early, and the service says so.
        self._sent = self._left <= 0 or not chunk
        return {"type": "http.request", "body": chunk, "more_body": not self._sent}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Tensors go to the file, a small document is kept."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
            return
        body = message.get("body", b"")
        if self._translated:
            self._written_bytes += self._out.write(body)
        else:
            self._document += body
        self.complete = not message.get("more_body", False)

    @property
    def _translated(self) -> bool:
        return self.status == 200 and self.headers.get("kvt-decision") == "translate"

    def summary(self) -> str:
        """One line about the translation. Raises Failure when there is none, or half of one."""
        if not self._translated:
            raise self._failure()
        size = int(self.headers["content-length"])
        if not self.complete or self._written_bytes != size:
            raise Failure(Code.DATA, "the translation broke off")
        bound = self.headers.get("kvt-kl-bound", "none, unproven")
        return (
            f"translated {self.headers['kvt-tokens']} tokens, native tail "
            f"{self.headers['kvt-native-tail']}, KL bound {bound}, by {self.headers['kvt-mapper']}"
        )

    def _failure(self) -> Failure:
        from service.answer import refusal

        said = refusal(self.status, self.headers, bytes(self._document))
        if self.status == 200:
            return Failure(Code.REPREFILL, f"re-prefill: {said.reason}: {said.detail}")
        return Failure(_CODES.get(said.code or "", Code.DATA), f"{said.code}: {said.detail}")


async def _exchange(settings: "Settings", source: BinaryIO, out: BinaryIO) -> Exchange:
    from service.app import create_app
    from service.logs import configure

    configure(settings)
    app = create_app(settings)
    service: Service = app.state.service
    for entry in service.store.entries:
        service.store.load(entry)
    exchange = Exchange(source, out)
    try:
        await app(exchange.scope, exchange.receive, exchange.send)
    finally:
        service.worker.stop()
    return exchange
