"""The pairs that recipes are compared on, all from packages.

=============== ======================================================================
name            source -> target
=============== ======================================================================
small-large     the embedded family upwards: 4 layers to 8, another rope_theta
large-small     and downwards
pruned-smollm2  SmolLM2-135M-Instruct without layers 10-17 -> SmolLM2-135M-Instruct
smollm2-tuned   SmolLM2-135M-Instruct -> itself after 60 steps of fine-tuning
smollm2-int4    SmolLM2-135M-Instruct -> itself with weights rounded to 4 bits
=============== ======================================================================
"""

from pathlib import Path
from typing import NamedTuple

from mappers import demo
from mappers.models import LoadedModel, ModelSpec, load_model
from tests.bench.pairs.smollm2 import MADE, made

EMBEDDED = Path(demo.__file__).parent


class Pair(NamedTuple):
    """Names of two models, directed."""

    source: str
    target: str

    def load(self, work: Path) -> tuple[LoadedModel, LoadedModel]:
        """Both models on the CPU in float32."""
        source, target = (load_model(ModelSpec(path=str(p))) for p in self.folders(work))
        return source, target

    def folders(self, work: Path) -> tuple[Path, Path]:
        """Where the models lie; those that are not there yet are made in ``work``."""
        return model_folder(self.source, work), model_folder(self.target, work)


PAIRS = {
    "small-large": Pair("small", "large"),
    "large-small": Pair("large", "small"),
    "pruned-smollm2": Pair("smollm2-pruned", "smollm2"),
    "smollm2-tuned": Pair("smollm2", "smollm2-tuned"),
    "smollm2-int4": Pair("smollm2", "smollm2-int4"),
}


def model_folder(name: str, work: Path) -> Path:
    """A folder that ``from_pretrained`` reads."""
    return made(name, work / "models") if name in MADE else EMBEDDED / name
