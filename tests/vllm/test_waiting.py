"""An export does not wait for the translations of other requests, however slow they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

pytest.importorskip("vllm", reason="only make test-vllm installs vLLM")

from vllm import SamplingParams
from vllm.v1.request import Request

from mappers.identity import IdentityClaim
from service.vllm.params import Handle, salt
from service.vllm_connector import LEASES, TRANSLATIONS
from tests.vllm.starting import OURS, engine_config, started
from tests.vllm.waiting import until

MAPPER = "sha256:" + "a" * 64
SOURCE = IdentityClaim(model="m", version="1", dtype="float32", rope_theta=10_000.0)
HANDLE = Handle(
    buffer="0" * 32, nbytes=4096, tokens=32, seal_offset=0, ranks=1, hops=0, source=SOURCE
)
LOAD = {"handle": HANDLE.model_dump(mode="json", exclude_none=True), "mapper": MAPPER}


@contextmanager
def slow_service() -> Iterator[str]:
    """It refuses leases at once, and does nothing else before it ends."""
    ending = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(500)

        def do_GET(self) -> None:
            ending.wait()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ending.set()
        server.shutdown()
        thread.join()
        server.server_close()


def request(name: str, **said: Any) -> Request:
    parameters = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": {"kvt": said}})
    return Request(name, list(range(64)), parameters, None, cache_salt=salt(MAPPER, 1))


def test_exports_do_not_wait_for_translations() -> None:
    export = request("export", export=True)
    with slow_service() as url:
        options = OURS | {"url": url, "deadline_seconds": 600.0, "lease_seconds": 600.0}
        connector = started(engine_config(), kv_connector_extra_config=options)
        loads = [request(f"load {number}", **LOAD) for number in range(TRANSLATIONS + LEASES)]
        for asked in (*loads, export):
            connector.on_new_request(asked)
        until(lambda: connector.get_num_new_matched_tokens(export, 0)[0] == 0, "it has an answer")
        for load in loads:
            assert connector.get_num_new_matched_tokens(load, 0) == (None, False)
        export.num_computed_tokens = export.num_tokens
        connector.request_finished(export, [1, 2])
        stats = connector.get_kv_connector_stats()
        connector.shutdown()
    assert stats is not None
    assert stats.data == {"export http_500": (1, 0)}
