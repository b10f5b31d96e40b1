"""What the gate lets through, and what it costs, on texts that the embedded family has not seen.

    python tests/bench/bench_gate.py                  # the promise
    python tests/bench/bench_gate.py --corruptions
    python tests/bench/bench_gate.py --features
    python tests/bench/bench_gate.py --cost

The promise: one JSON line for each threshold and kind of request (``gate_promise.py``) on stdout,
progress on stderr. ``domain``: that of the text, which the request names; ``..._unnamed``: it names
none, so the worst decides; ``..._mislabelled``: it names the other one, so that only the content
gate can tell; ``..._probed``: with the target's own KV of the first tokens.

``violations``: accepted prefixes whose KL is above the threshold; their share is between
``violation_lower_bound`` and ``violation_upper_bound``, each with confidence 1 - delta (Clopper and
Pearson), if prefixes were independent (several are of one document). ``recomputed``: the share of
the prompts' tokens that the target reads itself; ``recomputed_yes_or_no``: the same for a gate that
knows no native tail but one token.

With ``--corruptions``, one line a corruption: how many of the spoiled caches were refused. With
``--features``, how well each thing that is known at serving time tells good from bad. With
``--cost``, what the content gate costs beside the translation, and a body's digest.
"""

import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from mappers.probe import PROBE_TOKENS
from mappers.separation import separation
from service.policy import Policy
from tests.bench.gate_corruptions import corruption_lines
from tests.bench.gate_cost import cost_lines
from tests.bench.gate_data import DEMO, TEXTS, Family, Measured, measure, prefixes
from tests.bench.gate_promise import ASKED, folds, line
from tests.bench.rows import told

CORRUPTED = 128
FEATURES_TAIL = 32


def main(
    source: Annotated[Path, typer.Option(help="model folder")] = DEMO / "small",
    target: Annotated[Path, typer.Option(help="model folder")] = DEMO / "large",
    root: Annotated[Path, typer.Option(help="folder of artifacts")] = DEMO / "artifacts",
    length: Annotated[int, typer.Option(help="tokens of a prompt")] = 128,
    count: Annotated[int, typer.Option(help="prefixes of each domain")] = 400,
    max_kl: Annotated[list[float], typer.Option(help="thresholds")] = [0.1, 0.2, 0.4],  # noqa: B006
    alpha: Annotated[float, typer.Option()] = 0.1,
    delta: Annotated[float, typer.Option()] = 0.05,
    risk: Annotated[list[str], typer.Option(help="exceedance, mean")] = ["exceedance"],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="timings of each step")] = 5,
    corruptions: Annotated[bool, typer.Option("--corruptions")] = False,
    features: Annotated[bool, typer.Option("--features")] = False,
    cost: Annotated[bool, typer.Option("--cost")] = False,
) -> None:
    """Print one JSON line for each of what is asked for, and tables; the promise if nothing is."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    family = Family.load(source, target, root)
    if corruptions:
        told(corruption_lines(family, length=length, count=CORRUPTED))
    if cost:
        told(cost_lines(family, rounds=rounds))
    if corruptions or cost:
        return
    measured = [
        one
        for domain in TEXTS
        for one in measure(family, prefixes(domain, family.source, length=length)[:count])
    ]
    if features:
        told(feature_lines(measured))
        return
    policies = [
        Policy.model_validate({"max_kl": kl, "alpha": alpha, "delta": delta, "risk": name})
        for name in risk
        for kl in max_kl
    ]
    told(_promise(family, measured, policies))


def _promise(
    family: Family, measured: list[Measured], policies: list[Policy]
) -> Iterator[Mapping[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        parts = [*folds(family, measured, Path(folder))]
        for policy in policies:
            for label in ASKED:
                yield line(parts, label, policy)


def feature_lines(measured: list[Measured]) -> Iterator[Mapping[str, Any]]:
    """What each thing that is known at serving time says of the KL, on a held-out half."""
    for name, domains in (*((d, [d]) for d in TEXTS), ("both", [*TEXTS])):
        given = [m for m in measured if m.prefix.domain in domains]
        for probe_tokens in (0, PROBE_TOKENS):
            rows = [m.row(tail=FEATURES_TAIL, probe_tokens=probe_tokens) for m in given]
            for found in separation(rows):
                yield {
                    "domain": name,
                    "probe_tokens": probe_tokens,
                    "native_tail": FEATURES_TAIL,
                    **found._asdict(),
                }


if __name__ == "__main__":
    typer.run(main)
