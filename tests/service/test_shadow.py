"""Which answers are to be measured, under which names the books keep callers, and the headers."""

import hashlib
import json
import math
from pathlib import Path

import pytest

from service.settings import Settings
from service.shadow import Shadow
from tests.service.live import SAFETENSORS
from tests.service.pair import good
from tests.service.reporting import ask, served

SHADOW, OTHER = Shadow(b"s" * 32), Shadow(b"t" * 32)
IDS = [hashlib.md5(str(n).encode(), usedforsecurity=False).hexdigest() for n in range(8000)]


class TestChoice:
    @pytest.mark.parametrize("rate", [0.01, 0.2, 0.5])
    def test_the_share_is_the_rate(self, rate: float) -> None:
        chosen = sum(SHADOW.chosen(i, rate) for i in IDS)
        # Four standard deviations of the binomial.
        assert abs(chosen - rate * len(IDS)) < 4 * math.sqrt(len(IDS) * rate * (1 - rate))

    def test_none_and_all(self) -> None:
        assert not any(SHADOW.chosen(i, 0.0) for i in IDS)
        assert all(SHADOW.chosen(i, 1.0) for i in IDS)

    def test_a_higher_rate_only_adds(self) -> None:
        few = {i for i in IDS if SHADOW.chosen(i, 0.1)}
        assert few < {i for i in IDS if SHADOW.chosen(i, 0.3)}
        assert few == {i for i in IDS if SHADOW.chosen(i, 0.1)}

    def test_another_secret_chooses_independently(self) -> None:
        both = sum(SHADOW.chosen(i, 0.2) and OTHER.chosen(i, 0.2) for i in IDS)
        assert abs(both - 0.04 * len(IDS)) < 4 * math.sqrt(0.04 * len(IDS))


class TestNames:
    def test_a_token_is_of_one_answer_and_one_service(self) -> None:
        token = SHADOW.token(IDS[0])
        assert SHADOW.genuine(IDS[0], token)
        assert not SHADOW.genuine(IDS[1], token)
        assert not OTHER.genuine(IDS[0], token)
        assert not SHADOW.genuine(IDS[0], "")
        assert not SHADOW.genuine(IDS[0], "\u00e9" * 64)

    def test_no_use_of_the_secret_gives_away_another(self) -> None:
        marks = {SHADOW.token(IDS[0]), SHADOW.session(IDS[0]).hex(), SHADOW.client(IDS[0])}
        assert len(marks) == 3

    @pytest.mark.parametrize(
        ("one", "two", "same"),
        [
            ("192.0.2.1", "192.0.2.1", True),
            ("192.0.2.1", "192.0.2.2", False),
            ("2001:db8::1", "2001:db8::ffff:1", True),
            ("2001:db8::1", "2001:db8:0:1::1", False),
            ("::ffff:192.0.2.1", "192.0.2.1", True),
            ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
            (None, "a-socket", True),
        ],
    )
    def test_clients(self, one: str | None, two: str, same: bool) -> None:
        assert (SHADOW.client(one) == SHADOW.client(two)) is same
        assert one is None or one not in SHADOW.client(one)


class TestAnswers:
    def test_a_chosen_answer_says_so_in_headers_and_receipt(self, artifacts: Path) -> None:
        with served(Settings(artifacts=(artifacts,), shadow_rate=1, feedback_seconds=60)) as client:
            answer = ask(client)
        headers, shadow = answer.headers, receipt(answer.content)["shadow"]
        assert headers["kvt-shadow"] == "requested"
        assert shadow == {
            "answer_id": headers["kvt-answer-id"],
            "token": headers["kvt-feedback-token"],
            "expires_seconds": 60,
        }
        assert headers["kvt-answer-id"] == headers["x-request-id"]

    def test_any_other_answer_has_an_id_and_equal_requests_equal_receipts(
        self, artifacts: Path
    ) -> None:
        with served(Settings(artifacts=(artifacts,), shadow_rate=0)) as client:
            one, two = ask(client), ask(client)
        assert one.content == two.content
        assert receipt(one.content)["shadow"] is None
        assert one.headers["kvt-answer-id"] != two.headers["kvt-answer-id"]
        assert not {"kvt-shadow", "kvt-feedback-token"} & one.headers.keys()

    def test_no_caller_chooses_the_id(self, artifacts: Path) -> None:
        with served(Settings(artifacts=(artifacts,), shadow_rate=1)) as client:
            wished = {"X-Request-Id": IDS[0], "KVT-Answer-Id": IDS[0]}
            answer = client.post("/translate", content=good().body, headers=SAFETENSORS | wished)
        assert answer.headers["kvt-answer-id"] != IDS[0]

    def test_a_refusal_is_never_measured(self, artifacts: Path) -> None:
        with served(Settings(artifacts=(artifacts,), shadow_rate=1)) as client:
            answer = ask(client, max_kl=1e-6)
            assert answer.headers["kvt-decision"] == "reprefill"
            assert not {"kvt-shadow", "kvt-answer-id"} & answer.headers.keys()
            assert "kvt_shadow_requested_total{" not in client.get("/metrics").text

    def test_the_rate_is_the_pairs(self, artifacts: Path) -> None:
        [folder] = [path.name for path in artifacts.iterdir() if path.is_dir()]
        settings = Settings(
            artifacts=(artifacts,), shadow_rate=0, pairs={folder: {"shadow_rate": 1}}
        )  # type: ignore[dict-item]
        with served(settings) as client:
            assert ask(client).headers["kvt-shadow"] == "requested"


def receipt(body: bytes) -> dict[str, object]:
    size = int.from_bytes(body[:8], "little")
    found = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["kvt"])
    assert isinstance(found, dict)
    return found
