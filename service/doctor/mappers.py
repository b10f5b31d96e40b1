"""Whether a pair has a mapper that serves: there, loaded, with evidence, and breakers closed."""

from collections.abc import Iterator

from service.client import Client
from service.commands.exits import Code
from service.doctor.findings import Finding, fail, ok, warn
from service.listed import Wanted, is_between, pair_name
from service.schemas import MapperInfo


def check_mappers(client: Client, wanted: Wanted) -> tuple[list[Finding], list[MapperInfo]]:
    """Every mapper of the pair, and those of them that serve. Raises NotTranslated."""
    listed = client.mappers().mappers
    chosen = [each for each in listed if is_between(each, wanted)]
    if not chosen:
        return [_no_mapper(listed, wanted)], []
    findings = [(each, list(_of(each))) for each in chosen]
    serving = [each for each, found in findings if all(f.verdict != "fail" for f in found)]
    return [finding for _, found in findings for finding in found], serving


def _of(mapper: MapperInfo) -> Iterator[Finding]:
    yield _state(mapper)
    if mapper.state != "failed":
        yield _evidence(mapper)
    if mapper.breakers:
        yield _breakers(mapper)


def _state(mapper: MapperInfo) -> Finding:
    check = f"mapper {mapper.id}"
    if mapper.state == "failed":
        change = "kvt evaluate it if evidence is missing; kvt verify finds what else is wrong"
        return fail(check, Code.ARTIFACT, f"not loaded: {mapper.error}", change)
    if mapper.state == "unloaded":
        change = "preload it (kvt serve --preload), or POST /mappers/<id>/load"
        return warn(check, f"on {mapper.residency}: the first request is answered 503", change)
    return ok(check, f"{pair_name(mapper)}, {mapper.recipe}, on the {mapper.residency}")


def _evidence(mapper: MapperInfo) -> Finding:
    check = f"evidence {mapper.id}"
    if mapper.why_not_servable is not None:
        change = "kvt evaluate it on more held-out text, fit it better, or raise max_kl"
        return fail(check, Code.ARTIFACT, mapper.why_not_servable, change)
    if mapper.evidence_rows == 0:
        change = "kvt evaluate it; allow_unproven is for experiments"
        return warn(check, "none: answers are marked as unproven", change)
    lengths = ", ".join(map(str, mapper.certified_tokens))
    return ok(check, f"{mapper.evidence_rows} rows, prompts of {lengths} tokens")


def _breakers(mapper: MapperInfo) -> Finding:
    check = f"breakers {mapper.id}"
    not_closed = [each for each in mapper.breakers if each.state != "closed"]
    if not not_closed:
        return ok(check, f"{len(mapper.breakers)} closed")
    places = ", ".join(f"{b.domain} up to {b.max_tokens} tokens ({b.state})" for b in not_closed)
    change = "measured KLs were too large there: it closes when they are good again, or fit anew"
    return warn(check, places, change)


def _no_mapper(listed: list[MapperInfo], wanted: Wanted) -> Finding:
    names = " -> ".join(name or "any" for name in wanted)
    there = ", ".join(pair_name(each) for each in listed if each.source) or "none"
    change = "kvt fit one, serve its folder (--artifacts), or name a pair that is there"
    return fail("pair", Code.IDENTITY, f"no mapper for {names}; there are: {there}", change)
