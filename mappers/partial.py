"""What a stopped evaluation has measured so far: one file a document, each whole or not there."""

import json
from dataclasses import dataclass
from pathlib import Path

from mappers.checkpoint import read_checkpoint, write_checkpoint
from mappers.evidence_rows import CurveRow, DriftRow, EvidenceRow, Row
from mappers.measure import Found

SCHEMA = "evaluation-3"


@dataclass(frozen=True)
class Partial:
    """Documents of one evaluation, found again by ``digest``: of the mapper, texts and options.

    Each digest has a folder of its own in ``work``, so another evaluation is not mistaken for it.
    """

    work: Path
    digest: str

    def save(self, domain: int, document: int, found: Found) -> None:
        """Keep what document number ``document`` of domain number ``domain`` gave."""
        self._path(domain, document).parent.mkdir(parents=True, exist_ok=True)
        tables = {name: _dumped(getattr(found, name)) for name in ("rows", "curve", "drift")}
        facts = {"schema": SCHEMA, "tables": json.dumps(tables)}
        write_checkpoint(self._path(domain, document), found.sums, facts)

    def load(self, domain: int, document: int) -> Found | None:
        """What was kept of a document; None where nothing was.

        Raises ArtifactError when it is damaged.
        """
        path = self._path(domain, document)
        if not path.exists():
            return None
        sums, facts = read_checkpoint(path, SCHEMA)
        tables = json.loads(facts["tables"])
        return Found(
            rows=tuple(EvidenceRow.model_validate(row) for row in tables["rows"]),
            curve=tuple(CurveRow.model_validate(row) for row in tables["curve"]),
            drift=tuple(DriftRow.model_validate(row) for row in tables["drift"]),
            sums=sums,
        )

    def _path(self, domain: int, document: int) -> Path:
        return self.work / self.digest[:16] / f"{domain:03d}-{document:05d}.safetensors"


def _dumped(rows: tuple[Row, ...]) -> list[object]:
    return [row.model_dump(mode="json") for row in rows]
