"""A random artifact of a pair's shape, published by a process of its own.

    python -m mappers.bench_artifact GEOMETRY RECIPE K DTYPE FOLDER

The process that measures a load so has had none of the weights before. They are in memory once
here, and go to the disk as they lie.
"""

import subprocess
import sys
from pathlib import Path

import torch

from mappers import artifact
from mappers.bench_pairs import PAIRS, random_mapper
from mappers.cache import DTYPES
from mappers.manifest import ManifestFacts


def publish_random(geometry: str, recipe: str, k: int, dtype: torch.dtype, root: Path) -> Path:
    """The new artifact's folder under ``root``. Raises CalledProcessError; why is on stderr."""
    given = [geometry, recipe, str(k), str(dtype).removeprefix("torch."), str(root)]
    command = [sys.executable, "-m", __name__, *given]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return root / done.stdout.strip()


def main() -> None:
    """Publish one and say its name."""
    geometry, recipe, k, dtype, root = sys.argv[1:]
    torch.manual_seed(0)
    mapper = random_mapper(PAIRS[geometry], recipe=recipe, k=int(k), dtype=DTYPES[dtype])
    folder = artifact.publish(Path(root), mapper, ManifestFacts(ridge=0.0))
    sys.stdout.write(f"{folder.name}\n")


if __name__ == "__main__":
    main()
