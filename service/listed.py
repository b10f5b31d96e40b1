"""Models as a person names them, and what ``GET /mappers`` says of them."""

from collections.abc import Sequence

from mappers.errors import ArtifactError, UnsupportedModel
from mappers.identity import IdentityClaim
from service.schemas import MapperInfo, SideInfo

Wanted = tuple[str | None, str | None]
"""Source and target as they were named: ``MODEL`` or ``MODEL@VERSION``; None: any."""


def is_between(mapper: MapperInfo, wanted: Wanted) -> bool:
    """Whether a mapper translates between these two. One that could not be read says nothing of
    its models, and is found only where any will do."""
    sides = (mapper.source, mapper.target)
    return all(_is(side, name) for side, name in zip(sides, wanted, strict=True))


def pair_name(mapper: MapperInfo) -> str:
    """``MODEL@VERSION -> MODEL@VERSION``."""
    sides = (mapper.source, mapper.target)
    return " -> ".join(f"{side.model}@{side.version}" if side else "?" for side in sides)


def claim_of_listed(side: SideInfo | None) -> IdentityClaim | None:
    """What a request says of that model; None where the list does not say enough of it, as of the
    parameters of a scaled rope."""
    if side is None or side.rope_type != "default":
        return None
    return IdentityClaim.model_validate(side.model_dump())


def _is(side: SideInfo | None, name: str | None) -> bool:
    if name is None:
        return True
    return side is not None and name in (side.model, f"{side.model}@{side.version}")


def sides_between(
    mappers: Sequence[MapperInfo], source: str, target: str
) -> tuple[SideInfo, SideInfo]:
    """Both models of the only mapper between these two. Raises UnsupportedModel when there is none
    or more than one, ArtifactError when it could not be read."""
    found = [mapper for mapper in mappers if is_between(mapper, (source, target))]
    if len(found) != 1:
        raise UnsupportedModel("pair_not_found", f"{len(found)} mappers for {source} -> {target}")
    if found[0].source is None or found[0].target is None:
        raise ArtifactError("the service could not read the mapper")
    return found[0].source, found[0].target


def claims_of(sides: tuple[SideInfo, SideInfo]) -> tuple[IdentityClaim, IdentityClaim]:
    """What a request says of both. Raises UnsupportedModel for a scaled rope."""
    source, target = (claim_of_listed(side) for side in sides)
    if source is None or target is None:
        raise UnsupportedModel("scaled_rope", "models with a scaled rope cannot be named this way")
    return source, target
