"""Runs ``aither-kvcache``'s translation for ``peer.py``, with nothing of this project imported.

python peer_worker.py FOLDER PLAN     # then a line "take" or "go" asks, one line answers
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aither_kvcache.kvtransfer import capture, load_pack
from aither_kvcache.kvtransfer.geometry import KVGeometry
from aither_kvcache.kvtransfer.mapper import LayerMap
from aither_kvcache.kvtransfer.pack import write_pack
from aither_kvcache.kvtransfer.transfer import translate_cache
from safetensors.torch import load_file, save_file


def main() -> None:
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    source, target = (KVGeometry.from_dict(plan[side]) for side in ("source", "target"))
    _write(folder, plan["sources"], source, target)
    pack = load_pack(
        folder / "pack", live_source=source, live_target=target, require_acceptance=False
    )
    for line in sys.stdin:
        if line.strip() == "take":
            given = _taken(folder, source)
            layers = translate_cache(given[0], given[1], pack, given[2])
            _save_first(folder, layers[0])
            said = "taken"
        else:
            started = time.perf_counter()
            translate_cache(given[0], given[1], pack, given[2])
            said = str(time.perf_counter() - started)
        sys.stdout.write(said + "\n")
        sys.stdout.flush()


def _write(folder: Path, sources: Any, source: Any, target: Any) -> None:
    """The artifact as its pack, in float32; what it knows of a fit is made up."""
    weights = load_file(folder / "weights.safetensors")
    maps = {
        role: [
            LayerMap(
                target_layer=layer,
                role=role,
                source_layers=list(read),
                lam_rel=0.0,
                weight=weights[f"target.{layer}.{role}.W"].numpy(),
                bias=weights[f"target.{layer}.{role}.b"].numpy(),
                val_r2_mean=0.0,
                val_r2_per_head=[0.0] * target.n_kv_heads,
            )
            for layer, read in enumerate(sources)
        ]
        for role in ("k", "v")
    }
    write_pack(
        folder / "pack",
        maps,
        source=source,
        target=target,
        top_k=len(sources[0]),
        regime_flags=[],
        train_tokens=0,
        val_tokens=0,
        corpus_sha256="",
        created_at=0.0,
        weight_dtype="float32",
    )


def _taken(folder: Path, source: Any) -> tuple[Any, Any, Any]:
    """Keys without their rotary embedding and values, flat, and positions."""
    found = load_file(folder / "source.safetensors")
    positions = np.arange(found["k"].shape[1])
    pairs = [
        (keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        for keys, values in zip(found["k"], found["v"], strict=True)
    ]
    keys, values = capture._stack_layers(pairs, source, positions)
    return keys.astype(np.float32), values.astype(np.float32), positions


def _save_first(folder: Path, layer: Any) -> None:
    keys, values = (torch.from_numpy(side[0]).transpose(0, 1).contiguous() for side in layer)
    save_file({"k": keys, "v": values}, folder / "first.safetensors")


if __name__ == "__main__":
    main()
