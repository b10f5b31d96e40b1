"""``translate_cache`` of ``aither-kvcache`` 2.4.1 as a yardstick, with one of our artifacts in it.

It runs in a process of its own, from a folder of its own, as many threads as this one. What it is
timed for is the call alone: the rotary embedding is taken out of the source's keys beforehand, by
its own code. Before that, its first target layer is compared with ours.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors.torch import load_file, save_file

from mappers.bench_rounds import Step
from mappers.cache import KVCache
from mappers.identity import ModelIdentity
from mappers.mapper import Mapper
from mappers.translate import Translator

VERSION = "2.4.1"
WORKER = Path(__file__).with_name("peer_worker.py")
REST_SECONDS = 0.3
TOLERANCE = 5e-3


class Peer:
    """A running worker with a ``full_head`` mapper, from ``with`` to its end."""

    def __init__(self, package: Path, mapper: Mapper) -> None:
        self._package, self._mapper = package, mapper
        self._translator = Translator(mapper)

    @staticmethod
    def installed(folder: Path) -> Path:
        """The package, installed under a folder."""
        target = folder / f"aither-kvcache-{VERSION}"
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
        command = [*pip, "--target", str(target), f"aither-kvcache=={VERSION}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return target

    def __enter__(self) -> Self:
        self._temporary = tempfile.TemporaryDirectory()
        self._folder = Path(self._temporary.name)
        tensors = {}
        for name, affine in self._mapper.affine_maps():
            tensors[f"{name}.W"], tensors[f"{name}.b"] = affine.weight, affine.bias
        save_file(tensors, self._folder / "weights.safetensors")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(self._folder), self._plan()],
            env={"PYTHONPATH": str(self._package), **_threads()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()
        self._temporary.cleanup()

    def step(self, cache: KVCache) -> Step:
        """Its seconds for this cache, after one call whose result was ours."""
        file = self._folder / "source.safetensors"
        keys, values = (torch.stack(side).float() for side in (cache.keys, cache.values))
        save_file({"k": keys, "v": values}, file)
        self._ask("take")
        ours = next(self._translator.layers(cache, dtype=torch.float32))
        theirs = load_file(self._folder / "first.safetensors")
        for mine, name in zip(ours, ("k", "v"), strict=True):
            torch.testing.assert_close(theirs[name], mine, rtol=TOLERANCE, atol=TOLERANCE)
        return self._go

    def _go(self) -> float:
        # The threads of either process still spin for a while when its work is done.
        time.sleep(REST_SECONDS)
        seconds = float(self._ask("go"))
        time.sleep(REST_SECONDS)
        return seconds

    def _ask(self, word: str) -> str:
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the worker was started without pipes")
        process.stdin.write(word + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
        if not said:
            raise RuntimeError("aither-kvcache's worker has ended; its error is above")
        return said

    def _plan(self) -> str:
        mapper = self._mapper
        return json.dumps(
            {
                "source": _geometry(mapper.source),
                "target": _geometry(mapper.target),
                "sources": [layer.sources for layer in mapper.layers],
            }
        )


def _geometry(identity: ModelIdentity) -> dict[str, object]:
    """What its ``KVGeometry`` holds."""
    return {
        "model_id": identity.model,
        "family": identity.architecture,
        "n_layers": identity.num_layers,
        "n_kv_heads": identity.num_kv_heads,
        "head_dim": identity.head_dim,
        "hidden_size": identity.num_kv_heads * identity.head_dim,
        "rope_theta": identity.rope.theta,
        "rope_type": identity.rope.type,
        "rope_scaling_factor": 1.0,
        "tokenizer_sha256": identity.tokenizer_digest,
        "torch_dtype": "float32",
        "latent_attention": "",
        "rope_key_dim": 0,
    }


def _threads() -> dict[str, str]:
    count = str(torch.get_num_threads())
    return {name: count for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
