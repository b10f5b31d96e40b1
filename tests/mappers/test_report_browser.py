"""The page in a browser: it renders, light and dark, and there is ink in every plot."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from mappers.models import LoadedModel
from mappers.report import render
from tests.mappers import report_example

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
SIZE = (900, 7_000)
# The flags that keep a browser from asking anything of a network.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", f"--window-size={SIZE[0]},{SIZE[1]}"),
)
DARK = "--blink-settings=preferredColorScheme=0"
PLACES = """<script>
const places = [...document.querySelectorAll("figure svg")].map((svg) => {
  const {left, top, right, bottom} = svg.getBoundingClientRect();
  const wide = document.documentElement.scrollWidth > innerWidth;
  return {section: svg.closest("section").id, box: [left, top, right, bottom], wide};
});
document.body.append(Object.assign(document.createElement("pre"),
  {id: "places", textContent: JSON.stringify(places)}));
</script>"""

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"needs a browser on PATH: one of {', '.join(BROWSERS)}"
)


def browse(folder: Path, page: Path, *flags: str) -> str:
    """What the browser writes about a page."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'browser'}", *flags, page.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
    return done.stdout


def packed(picture: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Every pixel's colour as one number."""
    return picture.reshape(-1, 3).astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])


def luminance(picture: NDArray[np.uint8]) -> float:
    """Of the most frequent colour, from 0 to 1."""
    colours, counts = np.unique(packed(picture), return_counts=True)
    return sum(int(colours[counts.argmax()]).to_bytes(3)) / 3 / 255


def blue(picture: NDArray[np.uint8]) -> float:
    """The share of pixels that are clearly blue: axes and words are not, the first series is."""
    return float((picture[..., 2].astype(int) - picture[..., 0] > 60).mean())


@pytest.fixture(scope="module")
def page(
    source: LoadedModel, target: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    manifest = report_example.manifest(source.identity, target.identity)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(manifest, report_example.evidence()))
    return path


@pytest.fixture(scope="module")
def places(page: Path) -> list[tuple[str, list[int]]]:
    """Where each plot is: section, then left, top, right and bottom in pixels."""
    measured = page.with_name("measured.html")
    measured.write_text(page.read_text().replace("</body>", f"{PLACES}</body>"))
    found = re.search(r'<pre id="places">(.*?)</pre>', browse(page.parent, measured, "--dump-dom"))
    assert found is not None
    boxes = json.loads(found[1])
    assert not any(box["wide"] for box in boxes), "the page is no wider than its window"
    return [(box["section"], [round(edge) for edge in box["box"]]) for box in boxes]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_is_drawn(
    page: Path, places: list[tuple[str, list[int]]], scheme: str, tmp_path: Path
) -> None:
    shot = tmp_path / f"{scheme}.png"
    browse(tmp_path, page, f"--screenshot={shot}", *([DARK] if scheme == "dark" else []))
    picture = np.asarray(Image.open(shot).convert("RGB"))
    assert picture.shape[1] == SIZE[0]
    assert (luminance(picture) > 0.8) is (scheme == "light")
    assert (luminance(picture) < 0.2) is (scheme == "dark")
    assert {section for section, _ in places} == {
        *("kl", "acceptance", "arms", "curve", "drift", "layers", "r2"),
    }
    for section, (left, top, right, bottom) in places:
        assert right - left > 300, section
        assert bottom < SIZE[1], f"{section} is not in the picture"
        assert blue(picture[top:bottom, left:right]) > 5e-4, section
