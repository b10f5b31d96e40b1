"""What may be set for each pair, and that a request can only tighten it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from mappers.accept import Rule
from mappers.bounds import mean_bound
from service.policy import Policies, Policy
from service.settings import Settings
from service.wire import header_length, parse_header
from tests.service.pair import KLS, ROWS, good
from tests.service.reporting import ask, served


def receipt_of(client: Any, **changes: Any) -> dict[str, Any]:
    """The plan of a request: the gate's answer without tensors."""
    plan = client.post("/translate/plan", json=good(**changes).document)
    assert plan.status_code == 200
    return dict(plan.json())


def receipt_in(body: bytes) -> dict[str, Any]:
    """What an answer with tensors says of itself."""
    return dict(json.loads(parse_header(body[8 : 8 + header_length(body[:8])]).metadata["kvt"]))


@pytest.fixture
def mapper_id(artifacts: Path) -> str:
    [name] = [path.name for path in artifacts.iterdir() if path.is_dir()]
    return name


class TestPolicies:
    def test_every_field_of_a_policy_is_a_setting(self) -> None:
        for name, field in Policy.model_fields.items():
            assert Settings.model_fields[name].default == field.default
            assert field.description

    def test_a_pair_changes_what_it_names_and_no_more(self) -> None:
        policies = Policies(Policy(max_kl=0.3, alpha=0.2), {"m": Policy(max_kl=0.1)})
        assert policies.of("other") == Policy(max_kl=0.3, alpha=0.2)
        assert policies.of("m") == Policy(max_kl=0.1, alpha=0.2)

    def test_a_pair_can_set_a_default_back(self) -> None:
        policies = Policies(Policy(drift_budget=1.0), {"m": Policy(drift_budget=None)})
        assert policies.of("m").drift_budget is None

    def test_a_breaker_tolerates_alpha_unless_told_otherwise(self) -> None:
        assert Policy(alpha=0.2).eps == 0.2
        assert Policy(alpha=0.2, breaker_eps=0.05).eps == 0.05

    def test_a_mean_of_kls_clipped_at_the_threshold_would_always_meet_it(self) -> None:
        for default, pair in (
            ({"risk": "mean", "kl_clip": 0.1, "max_kl": 0.1}, {}),
            ({"risk": "mean", "kl_clip": 0.5}, {"max_kl": 0.5}),
            ({"kl_clip": 0.1}, {"risk": "mean"}),
        ):
            with pytest.raises(ValidationError, match="must be above max_kl"):
                Settings(**default, pairs={"m": Policy(**pair)})  # type: ignore[arg-type]
        fine = Settings(max_kl=0.5, pairs={"m": Policy(risk="mean", kl_clip=0.6, max_kl=0.1)})
        assert Policies(fine, fine.pairs).of("m").rule(0.05) == Rule(0.05, 0.1, 0.05, "mean", 0.6)

    def test_misspelt_ids_are_found(self) -> None:
        assert Policies(Policy(), {"a": Policy(), "b": Policy()}).unused({"a"}) == ["b"]


class TestYaml:
    def read(self, tmp_path: Path, document: object) -> Settings:
        path = tmp_path / "kvt.yaml"
        path.write_text(yaml.safe_dump(document))
        return Settings(config=path)

    def test_it_is_read(self, tmp_path: Path) -> None:
        pair = {"max_kl": 0.02, "domains": ["chat"], "native_tails": [8, 32], "shadow_rate": 0.5}
        settings = self.read(tmp_path, {"alpha": 0.2, "pairs": {"m": pair}})
        policy = Policies(settings, settings.pairs).of("m")
        assert policy == Policy(alpha=0.2, **pair)  # type: ignore[arg-type]
        assert policy.native_tails == (8, 32)

    @pytest.mark.parametrize(
        ("pair", "key"),
        [
            ({"max_kll": 0.1}, "max_kll"),
            ({"max_kl": -1}, "max_kl"),
            ({"max_kl": ".nan"}, "max_kl"),
            ({"alpha": 1}, "alpha"),
            ({"risk": "median"}, "risk"),
            ({"kl_clip": 0}, "kl_clip"),
            ({"reprefill_tokens_per_second": 0}, "reprefill_tokens_per_second"),
            ({"breaker_delta": 0}, "breaker_delta"),
            ({"shadow_rate": 1.5}, "shadow_rate"),
            ({"native_tails": [-1]}, "native_tails"),
            ({"domains": ["no spaces"]}, "domains"),
            ({"breaker_quorum": 3}, "breaker_quorum"),
            ({"port": 1}, "port"),
        ],
    )
    def test_a_bad_key_names_itself_and_its_pair(
        self, tmp_path: Path, pair: dict[str, object], key: str
    ) -> None:
        with pytest.raises(ValidationError) as caught:
            self.read(tmp_path, {"pairs": {"m": pair}})
        assert [error["loc"][:3] for error in caught.value.errors()] == [("pairs", "m", key)]


class TestService:
    def client(self, artifacts: Path, mapper_id: str, **pair: object) -> Any:
        return served(
            Settings(artifacts=(artifacts,), shadow_rate=0, pairs={mapper_id: Policy(**pair)})  # type: ignore[arg-type]
        )

    def test_the_pairs_threshold_holds(self, artifacts: Path, mapper_id: str) -> None:
        with self.client(artifacts, mapper_id, max_kl=KLS[True, 8]) as client:
            plan = receipt_of(client)
            assert (plan["native_tail"], plan["max_kl"]) == (8, KLS[True, 8])

    @pytest.mark.parametrize(
        ("asked", "tail", "in_force"),
        [(None, 8, 0.01), (1000.0, 8, 0.01), (0.01, 8, 0.01), (0.005, 32, 0.005)],
    )
    def test_a_request_only_tightens(
        self, artifacts: Path, mapper_id: str, asked: float | None, tail: int, in_force: float
    ) -> None:
        with self.client(artifacts, mapper_id, max_kl=0.01) as client:
            plan = receipt_of(client, tokens=48, max_kl=asked)
            assert (plan["native_tail"], plan["max_kl"]) == (tail, in_force)

    def test_only_tails_that_are_allowed(self, artifacts: Path, mapper_id: str) -> None:
        with self.client(artifacts, mapper_id, native_tails=[8]) as client:
            assert receipt_of(client, tokens=48)["native_tail"] == 8
            strict = receipt_of(client, tokens=48, max_kl=0.005)
            assert strict["reason"] == "certified_kl_exceeds_threshold"
            assert receipt_of(client, max_native_tail=1)["reason"] == "no_evidence"

    @pytest.mark.parametrize("domain", ["chat", None, "code"])
    def test_only_domains_that_are_allowed(
        self, artifacts: Path, mapper_id: str, domain: str | None
    ) -> None:
        with self.client(artifacts, mapper_id, domains=["chat"]) as client:
            expected = None if domain == "chat" else "no_evidence"
            assert receipt_of(client, domain=domain)["reason"] == expected
            assert ask(client, domain=domain).headers.get("kvt-reason") == expected

    def test_no_request_relaxes_a_domain(self, artifacts: Path, mapper_id: str) -> None:
        with self.client(artifacts, mapper_id, domains=["code"]) as client:
            assert receipt_of(client, domain="chat")["reason"] == "no_evidence"

    def test_alpha_and_delta_are_the_pairs(self, artifacts: Path, mapper_id: str) -> None:
        with self.client(artifacts, mapper_id, alpha=0.2, delta=0.1) as client:
            plan = receipt_of(client)
            assert (plan["alpha"], plan["delta"]) == (0.2, 0.1)
        with self.client(artifacts, mapper_id, alpha=0.01) as client:
            assert receipt_of(client)["reason"] == "no_evidence"

    def test_the_risk_is_the_pairs_and_named_in_every_answer(
        self, artifacts: Path, mapper_id: str
    ) -> None:
        with self.client(artifacts, mapper_id, risk="mean", kl_clip=0.5, max_kl=0.2) as client:
            plan = receipt_of(client)
            assert (plan["decision"], plan["risk"], plan["kl_clip"]) == ("translate", "mean", 0.5)
            receipt = receipt_in(ask(client).content)
            assert (receipt["risk"], receipt["kl_clip"]) == ("mean", 0.5)
            assert (
                receipt["kl_bound"]
                == plan["kl_bound"]
                == pytest.approx(mean_bound([KLS[True, 1]] * ROWS, 0.5, 0.05))
            )
            assert receipt["guarantee"] == "mean of min(KL, 0.5) <= 0.2 with confidence 0.95"
        with self.client(artifacts, mapper_id) as client:
            assert receipt_of(client)["risk"] == "exceedance"
            receipt = receipt_in(ask(client).content)
            assert receipt["guarantee"] == "P(KL > 0.15) <= 0.1 with confidence 0.95"

    def test_another_pair_is_left_alone(self, artifacts: Path) -> None:
        with self.client(artifacts, "another-mapper", max_kl=1e-9) as client:
            assert receipt_of(client)["max_kl"] == Settings().max_kl
