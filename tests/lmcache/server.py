"""A real LMCache server on the CPU, and what an engine does with it: register a layout."""

import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import torch
import zmq
from lmcache.v1.gpu_connector.utils import LayoutHints
from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from mappers.identity import ModelIdentity

CHUNK_TOKENS = 16
START_SECONDS = 240  # nearly all of it is imports, on a machine that may be busy


class Address(NamedTuple):
    """Where requests go, and where it is looked at."""

    url: str
    http_url: str


@contextmanager
def lmcache_server(log: Path) -> Iterator[Address]:
    """``lmcache server``, with chunks of 16 tokens."""
    port, http_port = _free_port(), _free_port()
    command = [
        *(str(Path(sys.executable).parent / "lmcache"), "server"),
        *("--host", "127.0.0.1", "--port", str(port), "--disable-metrics"),
        *("--http-host", "127.0.0.1", "--http-port", str(http_port)),
        *("--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "auto"),
        *("--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"),
    ]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        address = Address(f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http_port}")
        _wait(process, address, log)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def register(address: Address, name: str, model: ModelIdentity) -> object:
    """What an engine that runs on one rank does at its start; keep what it returns."""
    client = RequestClientFactory.create(address.url, context=zmq.Context())
    block = (4, 2, model.num_kv_heads, CHUNK_TOKENS, model.head_dim)
    caches = {f"layer.{index}": torch.zeros(block) for index in range(model.num_layers)}
    engine = create_transfer_context(
        caches,
        instance_id=uuid.uuid4().int >> 65,
        req_client=client,
        mode="lmcache_driven",
    )
    hints = LayoutHints(
        kv_layout="HND",
        num_kv_heads=model.num_kv_heads,
        tokens_per_block=CHUNK_TOKENS,
        head_dim=model.head_dim,
    )
    engine.register(caches, name, 1, 1, 60.0, layout_hints=hints)
    return engine


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], address: Address, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{address.http_url}/config").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"LMCache did not start: {log.read_text()[-2000:]}")
