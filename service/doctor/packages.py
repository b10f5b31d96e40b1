"""Whether the packages of this environment are those that the distribution asks for."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from service.commands.exits import Code
from service.doctor.findings import Finding, fail, ok
from service.health import NAME

_NAMED = ("torch", "transformers", "safetensors")


def check_packages() -> Finding:
    """Every requirement that holds here, extras aside."""
    wanted = [Requirement(line) for line in requires(NAME) or ()]
    needed = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = [fault for each in needed if (fault := unmet(each))]
    if wrong:
        change = f"install {NAME} again with its constraints, in an environment of its own"
        return fail("packages", Code.USAGE, "; ".join(wrong), change)
    named = ", ".join(f"{name} {version(name)}" for name in _NAMED)
    return ok("packages", f"{named}; all {len(needed)} are as required")


def unmet(requirement: Requirement) -> str | None:
    """What is wrong with a package; None when it is as required."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed, {requirement} is required"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement.name} is {installed}, {requirement} is required"
