"""``aither-kvcache`` 2.4.1 from PyPI: its own capture, fit and translation, as a subprocess.

It is installed in a folder of its own under the work folder, never beside the project; caches go
to it and come back as safetensors files.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mappers.cache import KVCache
from mappers.corpus import Corpus
from mappers.models import LoadedModel
from tests.bench.recipe_bench.fitted import Fitted
from tests.bench.recipe_bench.reading import Document

VERSION = "2.4.1"
WORKER = Path(__file__).with_name("aither_worker.py")


class Aither:
    """A pack of one pair and k, fitted where it is not there yet, on the same windows as ours."""

    def __init__(self, work: Path, name: str, folders: tuple[Path, Path], k: int) -> None:
        self.package = _installed(work / f"aither-kvcache-{VERSION}")
        self.folder, self.models, self.k = work / "aither" / name, folders, k

    @contextmanager
    def fitted(self, target: LoadedModel, corpus: Corpus) -> Iterator[Fitted]:
        """Its translation, as long as the context lasts, and its costs."""
        costs = self._fit(target, corpus)
        with self._translating() as exchange:
            yield Fitted(exchange.translate, **costs)

    def _fit(self, target: LoadedModel, corpus: Corpus) -> dict[str, Any]:
        """Its costs: CPU seconds of capture and fit, FLOPs a token, bytes."""
        done = self.folder / f"k={self.k}.json"
        if not done.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            texts = [target.tokenizer.decode(ids) for ids in corpus.windows]
            (self.folder / "texts.json").write_text(json.dumps(texts))
            command = self._command("fit", str(len(corpus.windows[0])))
            subprocess.run(command, env=self._environment(), check=True, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(done.read_text())
        return found

    @contextmanager
    def _translating(self) -> Iterator["Exchange"]:
        process = subprocess.Popen(
            self._command("translate"),
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Exchange(process, self.folder)
        finally:
            process.communicate()

    def _command(self, *verb: str) -> list[str]:
        given = [str(path) for path in (self.folder, *self.models)]
        return [sys.executable, str(WORKER), str(self.k), *given, *verb]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.package), "TOKENIZERS_PARALLELISM": "false"}


class Exchange:
    """A running worker: one line with two file names asks, one line answers."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process = process
        self._files = (folder / "source.safetensors", folder / "target.safetensors")

    def translate(self, document: Document) -> KVCache:
        """The target's cache of all of a document's prompt tokens."""
        asked, answered = self._files
        source = document.source
        save_file({"k": torch.stack(source.keys), "v": torch.stack(source.values)}, asked)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker was started without pipes")
        self._process.stdin.write(json.dumps([str(file) for file in self._files]) + "\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError("aither-kvcache's worker has ended; its error is above")
        found = load_file(answered)
        return KVCache(tuple(found["k"]), tuple(found["v"]), source.positions)


def _installed(folder: Path) -> Path:
    if not folder.exists():
        pip: Sequence[str] = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
        partial = folder.with_suffix(".partial")
        package = f"aither-kvcache=={VERSION}"
        subprocess.run([*pip, "--target", str(partial), package], check=True, stdout=sys.stderr)
        partial.rename(folder)
    return folder
