"""Tensors on disk between two runs of a fit: written whole or not at all, checked when read."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mappers.errors import ArtifactError
from mappers.identity import shown


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Replace ``path`` by a safetensors file; a crash leaves the old one or the new one.

    ``facts`` go into its metadata and must name their ``schema``.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        save_file(dict(tensors), unfinished, metadata=dict(facts))
        _flush(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    _flush(path.parent)


def read_checkpoint(path: Path, schema: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and facts of a checkpoint.

    Raises ArtifactError when it is damaged or of another schema, FileNotFoundError when not there.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ArtifactError(
            f"this checkpoint is damaged: expected safetensors, {schema}"
        ) from error
    if (found := facts.get("schema")) != schema:
        raise ArtifactError(f"this checkpoint's schema is {shown(found)}, expected {schema}")
    return tensors, facts


def _flush(path: Path) -> None:
    """fsync of a file's bytes, or of a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
