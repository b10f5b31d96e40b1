"""A probe end to end: real models, a mapper that ``kvt fit`` made, evidence that it measured."""

import httpx
import pytest
import torch
from starlette.testclient import TestClient

from mappers import artifact
from mappers.collect import cache_of_text
from mappers.layouts import Layout
from mappers.models import LoadedModel, ModelSpec, load_model
from mappers.probe import PROBE_TOKENS
from service.hf import claim_of
from service.schemas import Probe, TranslateRequest
from service.settings import Settings
from service.upload import Upload
from tests.service.reporting import served
from tests.service.test_translate import answered
from tests.service.tiny_family import TOKENS, family, text


def translated(
    client: TestClient, small: LoadedModel, large: LoadedModel, ids: torch.Tensor
) -> httpx.Response:
    """The small model's cache with the large one's own first tokens, sent as the client does."""
    probe = cache_of_text(large, ids).slice(0, PROBE_TOKENS)
    request = TranslateRequest(
        source=claim_of(small.identity),
        target=claim_of(large.identity),
        tokens=len(ids),
        layout=Layout.NHD,
        probe=Probe(tokens=PROBE_TOKENS),
        domain="in_domain",
    )
    upload = Upload.of(cache_of_text(small, ids), request, probe)
    return client.post("/translate", content=b"".join(upload), headers=upload.headers)


def test_the_answer_begins_with_what_the_target_computed_itself(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = family(tmp_path_factory)
    small, large = (load_model(ModelSpec(path=str(folder / name))) for name in ("small", "large"))
    [fitted] = [p for p in artifact.find(folder / "artifacts") if p.name.startswith("small-")]
    settings = Settings(
        artifacts=(fitted,), shadow_rate=0, max_kl=5.0, drift_budget=None, native_tails=(32,)
    )
    ids = torch.tensor(small.tokenizer(text(7))["input_ids"][:TOKENS])
    with served(settings) as client:
        answer = translated(client, small, large, ids)
        receipt, tensors = answered(answer.content)
    probe = cache_of_text(large, ids).slice(0, PROBE_TOKENS)
    assert 0 < float(str(receipt["probe_error"])) < 1
    for layer in range(probe.num_layers):
        assert torch.equal(tensors[f"layers.{layer}.k"][:PROBE_TOKENS], probe.keys[layer])
        assert torch.equal(tensors[f"layers.{layer}.v"][:PROBE_TOKENS], probe.values[layer])
