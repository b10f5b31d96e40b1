"""Runs ``aither-kvcache`` for ``aither.py``, with nothing of this project imported.

    python aither_worker.py K FOLDER SOURCE TARGET fit WINDOW_TOKENS
    python aither_worker.py K FOLDER SOURCE TARGET translate

Everything is what its own command lines do, but for two things: the text comes from a file, so that
the tokens are those that the other recipes are fitted on (a quarter of the windows is its
validation set, as it does by itself), and a pack without its own acceptance run is loaded, for
here the benchmark measures it.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from aither_kvcache.kvtransfer import capture, fit, load_pack
from aither_kvcache.kvtransfer.geometry import KVGeometry
from aither_kvcache.kvtransfer.transfer import translate_cache
from safetensors.torch import load_file, save_file


def fit_pair(k: int, folder: Path, source: str, target: str, window_tokens: int) -> None:
    """Capture where that has not been done for this pair, fit, and record what both took."""
    texts = json.loads((folder / "texts.json").read_text())
    record = folder / "capture.json"
    if not record.exists():
        capture.gather_corpus = lambda roots, suffixes, limit: texts
        validation = len(texts) // 4
        began = time.process_time()
        capture.capture_pair(
            source,
            target,
            folder / "capture",
            corpus_roots=[],
            seq_len=window_tokens,
            train_seqs=len(texts) - validation,
            val_seqs=validation,
        )
        record.write_text(json.dumps({"seconds": time.process_time() - began}))
    began = time.process_time()
    fit.fit_pack(folder / "capture", folder / f"pack-{k}", top_k=k)
    seconds = time.process_time() - began
    pack = _pack(k, folder)
    weights = {name: value for name, value in pack.weights.items() if name.endswith(".W")}
    costs = {
        "fit_seconds": json.loads(record.read_text())["seconds"] + seconds,
        "flops_per_token": sum(2 * weight.size for weight in weights.values()),
        "nbytes": sum(value.nbytes for value in pack.weights.values()),
    }
    (folder / f"k={k}.json").write_text(json.dumps(costs))


def translate(k: int, folder: Path) -> None:
    """Answer line by line: the source's cache in one file, the target's into the other."""
    pack = _pack(k, folder)
    for line in sys.stdin:
        asked, answered = json.loads(line)
        found = load_file(asked)
        positions = np.arange(found["k"].shape[1])
        pairs = [
            (keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            for keys, values in zip(found["k"], found["v"], strict=True)
        ]
        flat = capture._stack_layers(pairs, pack.source, positions)
        layers = translate_cache(*(side.astype(np.float32) for side in flat), pack, positions)
        keys, values = (
            torch.stack([torch.from_numpy(layer[side][0]).transpose(0, 1) for layer in layers])
            for side in (0, 1)
        )
        save_file({"k": keys.contiguous(), "v": values.contiguous()}, answered)
        sys.stdout.write("done\n")
        sys.stdout.flush()


def _pack(k: int, folder: Path):  # type: ignore[no-untyped-def]
    """With the geometries that the capture recorded as those of the live models."""
    recorded = capture.CaptureManifest.read(folder / "capture")
    return load_pack(
        folder / f"pack-{k}",
        live_source=KVGeometry.from_dict(recorded.source),
        live_target=KVGeometry.from_dict(recorded.target),
        require_acceptance=False,
    )


def main() -> None:
    k, folder, source, target, verb, *rest = sys.argv[1:]
    if verb == "fit":
        shutil.rmtree(Path(folder) / f"pack-{k}", ignore_errors=True)
        fit_pair(int(k), Path(folder), source, target, int(rest[0]))
    else:
        translate(int(k), Path(folder))


if __name__ == "__main__":
    main()
