"""The gate's promise on the embedded family: of what passes, few are above the KL threshold.

Cross-fitted: no document is in the evidence that decides about it (``gate_promise.py``). The fast
tests are on fewer prefixes than the slow ones, and else the same.
"""

from pathlib import Path

import pytest
import safetensors.torch

from mappers.arms import read_all, read_tail
from mappers.bench import Depth
from mappers.cache import KVCache, consecutive
from mappers.corpus import Corpus
from mappers.evaluate import evaluate
from mappers.evidence import Arm
from mappers.metrics import Reference
from service.policy import Policy
from service.upload import Upload
from tests.bench.gate_corruptions import serving
from tests.bench.gate_data import DEMO, TAILS, TEXTS, Family, Measured, measure, prefixes
from tests.bench.gate_promise import ASKED, Folds, folds, line, request_for

LENGTH, FEW, MANY = 128, 100, 400
THRESHOLDS = (0.1, 0.2, 0.4)
NAMED = ("in_domain", "out_of_domain")
UNNAMED = ("in_domain_unnamed", "out_of_domain_unnamed")
PROBED = ("in_domain_probed", "out_of_domain_probed")


@pytest.fixture(scope="module")
def family() -> Family:
    return Family.load(DEMO / "small", DEMO / "large", DEMO / "artifacts")


def parted(family: Family, folder: Path, count: int, *, probe: bool) -> Folds:
    """``count`` prefixes of each domain, measured, with the services that judge them."""
    given = [prefixes(domain, family.source, length=LENGTH)[:count] for domain in TEXTS]
    measured = [one for part in given for one in measure(family, part, probe=probe)]
    return [*folds(family, measured, folder)]


@pytest.fixture(scope="module")
def few(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Folds:
    return parted(family, tmp_path_factory.mktemp("few"), FEW, probe=False)


@pytest.fixture(scope="module")
def many(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Folds:
    return parted(family, tmp_path_factory.mktemp("many"), MANY, probe=True)


def policy(threshold: float, **changes: object) -> Policy:
    return Policy.model_validate({"max_kl": threshold, **changes})


def assert_kept(parts: Folds, label: str, threshold: float) -> None:
    """No more than alpha of the accepted are above the threshold, for both risks."""
    found = line(parts, label, policy(threshold))
    assert found["violations"] <= found["alpha"] * found["accepted"]
    assert found["recomputed"] <= found["recomputed_yes_or_no"]
    softer = line(parts, label, policy(threshold, risk="mean"))
    assert softer["accepted"] == 0 or softer["mean_kl"] <= threshold


def assert_useful(parts: Folds) -> None:
    """60 % are accepted, in domain, at a threshold which the mean KL meets by 2x."""
    found = line(parts, "in_domain", policy(0.2))
    assert found["acceptance"] >= 0.6
    assert found["mean_kl"] <= 0.1
    assert found["recomputed"] < 0.7 * found["recomputed_yes_or_no"]


def assert_seen(parts: Folds) -> None:
    """What a gate that promises next to nothing lets through is too much, and it shows."""
    found = line(parts, "in_domain", policy(0.1, alpha=0.9))
    assert found["violation_lower_bound"] > 0.1


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("label", [*NAMED, *UNNAMED])
def test_few_that_pass_are_above_the_threshold(few: Folds, label: str, threshold: float) -> None:
    assert_kept(few, label, threshold)


def test_most_pass(few: Folds) -> None:
    assert_useful(few)


def test_violations_would_be_seen(few: Folds) -> None:
    assert_seen(few)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("label", [*NAMED, *UNNAMED, *PROBED])
def test_few_of_many_that_pass_are_above(many: Folds, label: str, threshold: float) -> None:
    assert_kept(many, label, threshold)


@pytest.mark.slow
def test_most_of_many_pass(many: Folds) -> None:
    assert_useful(many)


@pytest.mark.slow
def test_violations_of_many_would_be_seen(many: Folds) -> None:
    assert_seen(many)


def test_rows_read_in_batches_are_those_of_an_evaluation(family: Family) -> None:
    given = prefixes("in_domain", family.source, length=LENGTH)[:3]
    artifact, names = family.artifact, tuple(prefix.document for prefix in given)
    expected = evaluate(
        artifact.mapper,
        family.source,
        family.target,
        {"in_domain": Corpus(tuple(prefix.ids for prefix in given), names, frozenset())},
        lengths=(LENGTH,),
        native_tails=TAILS,
        profile=artifact.profile,
        probe_queries=artifact.probe_queries,
        depth=Depth(documents=0, hops=0, turns=1),
        progress=False,
    )
    twins = {
        (row.document, row.native_tail, row.probe_tokens): row
        for row in expected.rows
        if row.arm is Arm.TRANSLATED and row.prefix_known
    }
    translated = [
        row for m in measure(family, given) for row in m.rows if row.arm is Arm.TRANSLATED
    ]
    assert len(translated) == len(twins)
    for row in translated:
        twin = twins[row.document, row.native_tail, row.probe_tokens]
        for name in ("kl", "score", "probe_error", "tail_nll", "source_tail_nll"):
            mine, theirs = getattr(row, name), getattr(twin, name)
            assert (mine is None) is (theirs is None), name
            assert mine is None or mine == pytest.approx(theirs, rel=1e-3), name


def test_what_is_served_is_what_was_judged(few: Folds, family: Family) -> None:
    """Over HTTP: the same decisions, and answers whose KL is the one that was counted."""
    served, measured = few[0]
    asked, judged = ASKED["in_domain"], policy(0.2)
    mine = [m for m in measured if m.prefix.domain == asked.domain][:4]
    with serving(served.entry.path, max_kl=judged.max_kl) as client:
        for m in mine:
            expected = served.outcome(m, asked, judged)
            upload = Upload.of(m.cache, request_for(served.entry, m.prefix, asked))
            answer = client.post("/translate", content=b"".join(upload), headers=upload.headers)
            assert answer.headers.get("kvt-reason") == expected.reason
            if expected.reason is None:
                assert int(answer.headers["kvt-native-tail"]) == expected.native_tail
                assert kl(family, m, answer.content, expected.native_tail) == pytest.approx(
                    expected.kl, rel=1e-3
                )


def kl(family: Family, measured: Measured, body: bytes, tail: int) -> float:
    """The KL of an answer that came as safetensors."""
    prefix, layers = measured.prefix, range(family.artifact.mapper.target.num_layers)
    sent = safetensors.torch.load(body)
    keys, values = (tuple(sent[f"layers.{i}.{kind}"] for i in layers) for kind in "kv")
    cache = KVCache(keys, values, consecutive(len(keys[0])))
    _, native = read_all(family.target.model, prefix.ids, (prefix.length,))
    read = read_tail(family.target, [cache], prefix.ids, length=prefix.length, tail=tail)
    return Reference(native[0], prefix.ids[prefix.length :]).compare(read[0]).kl
