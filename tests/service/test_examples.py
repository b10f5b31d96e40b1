"""The example scripts, run as they are against the embedded family."""

import re
import runpy
from pathlib import Path

import pytest

from service.demo.family import EMBEDDED
from service.settings import Settings
from tests.service.threaded import serving

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"


def test_switching_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Settings(artifacts=(EMBEDDED / "artifacts",), shadow_rate=0)) as running:
        monkeypatch.setattr("sys.argv", ["switch_models.py", running.url])
        left = runpy.run_path(str(EXAMPLES / "switch_models.py"))
    said = capsys.readouterr().out
    found = re.search(r"512 tokens: the large model reads (\d+) of them", said)
    assert found is not None, said
    # A certified tail, and the token that the small model wrote last and never read.
    assert 1 < int(found[1]) <= 129
    assert left["cache"] is not None
    assert "over the translated cache:" in said
    assert left["answer"].sequences.shape[1] > 512
