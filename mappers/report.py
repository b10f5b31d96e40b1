"""The mapper's report: one HTML page without a single outside reference.

Everything shown comes from the manifest and the evidence; names in it are text that somebody chose,
so the template escapes all of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mappers.evidence import Arm, Evidence
from mappers.identity import ModelIdentity
from mappers.manifest import Manifest
from mappers.summary import Cell, Setting, recovered, summarise

TILE_PIXELS = 12
MARGIN_PIXELS = 16
Cells = Mapping[Setting, Cell]


def render(manifest: Manifest, evidence: Evidence) -> str:
    """The whole page."""
    cells = summarise(evidence)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"short": _short, "percent": _percent}
    return environment.get_template("report.html.j2").render(
        manifest=manifest,
        source=manifest.source,
        target=manifest.target,
        verdict=verdict(evidence),
        kl_tables={domain: list(_kl_rows(cells, domain)) for domain in _domains(cells)},
        kept=list(_kept(cells)),
        maps={
            name: _heat_map(r2, manifest.sources)
            for name, r2 in (("keys", manifest.r2_keys), ("values", manifest.r2_values))
            if r2 is not None
        },
        identities=list(_identities(manifest.source, manifest.target)),
    )


def verdict(evidence: Evidence) -> str:
    """One sentence about the longest prompts of the first domain, with the middle native tail."""
    cells = summarise(evidence)
    keys = [k for k in _translated(cells) if k.domain == evidence.rows[0].domain]
    if not keys:
        return "Nothing translated was measured."
    longest = max(k.length for k in keys)
    tails = [k for k in keys if k.length == longest]
    key = tails[len(tails) // 2]
    bare = cells[_bare(key)].kl
    cell, context = cells[key], recovered(cells, key).context
    better = "better than" if cell.kl < bare else "no better than"
    return (
        f"On {key.domain} text, with prompts of {key.length} tokens of which the target reads the "
        f"last {key.native_tail} natively, the translation has a mean KL of {_short(cell.kl)} nats "
        f"a token: {better} reading that tail alone ({_short(bare)}), with {_percent(context)} of "
        f"the context recovered."
    )


def _translated(cells: Cells) -> list[Setting]:
    return [k for k in cells if k.arm is Arm.TRANSLATED and k[4:] == (True, 0, 0)]


def _domains(cells: Cells) -> list[str]:
    return list(dict.fromkeys(key.domain for key in cells))


def _bare(key: Setting) -> Setting:
    """The arm that reads the same tail over nothing."""
    if key.native_tail == 1:
        return key._replace(arm=Arm.NO_CONTEXT, native_tail=0, prefix_known=False)
    return key._replace(arm=Arm.LAST_TOKENS, prefix_known=False)


def _kl_rows(cells: Cells, domain: str) -> Iterator[dict[str, Any]]:
    for key in _translated(cells):
        if key.domain == domain:
            wrong = key._replace(arm=Arm.WRONG_DOCUMENT)
            columns = (key, key._replace(prefix_known=False), _bare(key), wrong)
            yield {
                "length": key.length,
                "tail": key.native_tail,
                "documents": cells[key].documents,
                "cells": [cells.get(column) for column in columns],
            }


def _kept(cells: Cells) -> Iterator[dict[str, Any]]:
    for key in _translated(cells):
        around = {k.arm: c for k, c in cells.items() if k[:2] == key[:2] and not k.native_tail}
        gap, context = recovered(dict(cells), key)
        yield dict(
            domain=key.domain,
            length=key.length,
            tail=key.native_tail,
            native=around[Arm.NATIVE].nll,
            source=around[Arm.SOURCE_ALONE].nll,
            nll=cells[key].nll,
            top1=cells[key].top1,
            gap=gap,
            context=context,
        )


def _heat_map(r2: Sequence[Sequence[float]], read: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Tiles of an R2 matrix [L_s, L_t], source layer 0 at the bottom."""
    sources, targets = len(r2), len(r2[0])
    tiles = [
        dict(
            x=MARGIN_PIXELS + target * TILE_PIXELS,
            y=MARGIN_PIXELS + (sources - 1 - source) * TILE_PIXELS,
            fill=_colour(r2[source][target]),
            read=source in read[target],
            source=source,
            target=target,
            r2=r2[source][target],
        )
        for source in range(sources)
        for target in range(targets)
    ]
    # Frames are drawn last, so that no neighbour covers them.
    tiles.sort(key=lambda tile: bool(tile["read"]))
    return dict(
        tiles=tiles,
        side=TILE_PIXELS - 1,
        left=MARGIN_PIXELS,
        width=MARGIN_PIXELS + max(targets * TILE_PIXELS, 120),
        height=MARGIN_PIXELS + max(sources * TILE_PIXELS, 100),
        sources=sources,
        targets=targets,
    )


def _identities(source: ModelIdentity, target: ModelIdentity) -> Iterator[tuple[str, Any, Any]]:
    a, b = (side.model_dump(mode="json") for side in (source, target))
    for field in a:
        if field == "rope":
            for name in ("type", "theta", "max_position_embeddings"):
                yield f"rope {name}", a[field][name], b[field][name]
        elif field != "attention":
            yield field.replace("_", " "), a[field], b[field]


def _colour(r2: float) -> str:
    """White for nothing explained, dark teal for everything."""
    share = min(max(r2, 0.0), 1.0) if math.isfinite(r2) else 0.0
    red, green, blue = (round(high + (low - high) * share) for high, low in _ENDS)
    return f"#{red:02x}{green:02x}{blue:02x}"


_ENDS = ((238, 11), (243, 83), (241, 69))


def _short(number: float) -> str:
    return f"{number:.3g}" if math.isfinite(number) else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else "-"
