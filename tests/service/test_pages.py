"""Folders of SGLang's pages as we read and write them (``tests/sglang`` has SGLang's own code)."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from mappers.cache import KVCache
from mappers.errors import LayoutError
from service.bridge.pages import Pages, PagesError, page_hashes
from tests.service.pair import SOURCE, cache
from tests.service.test_bridge import side

PAGE = 4
IDS = list(range(10))


def pages(folder: Path, layout: Literal["layer_first", "page_first"], dtype: str) -> Pages:
    model = side(SOURCE).model_copy(update={"kv_dtype": dtype})
    return Pages(folder, "org/small", model, page_tokens=PAGE, layout=layout)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read(
    tmp_path: Path, layout: Literal["layer_first", "page_first"], dtype: str
) -> None:
    kept, given = pages(tmp_path, layout, dtype), cache(8, dtype=dtype)
    kept.write(given, IDS[:8], "salt")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{digest}_org-small_0_1.bin" for digest in page_hashes(IDS, "salt", PAGE)
    )
    for asked, tokens in ((IDS, 8), (IDS[:7], 4), ([*IDS[:4], 99, *IDS[5:]], 4)):
        found = kept.read(asked, "salt")
        assert isinstance(found, KVCache)
        assert found.tokens == tokens
        for ours, theirs in zip(found.keys + found.values, given.keys + given.values, strict=True):
            assert torch.equal(ours, theirs[:tokens])
    for asked, salt in ((IDS, ""), (IDS, "salt2"), (IDS[:3], "salt"), (IDS[1:], "salt")):
        assert kept.read(asked, salt) is None


def test_a_page_of_another_size(tmp_path: Path) -> None:
    pages(tmp_path, "layer_first", "float32").write(cache(4), IDS[:4], "")
    with pytest.raises(LayoutError, match="1536 bytes: expected torch.bfloat16"):
        pages(tmp_path, "layer_first", "bfloat16").read(IDS, "")


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    kept, (first, _) = pages(tmp_path, "layer_first", "float32"), page_hashes(IDS, "", PAGE)
    in_the_way = tmp_path / f"{first}_org-small_0_1.bin"
    in_the_way.mkdir()
    with pytest.raises(PagesError, match="written: IsADirectoryError"):
        kept.write(cache(8), IDS[:8], "")
    assert list(tmp_path.iterdir()) == [in_the_way]
    with pytest.raises(PagesError, match="read: IsADirectoryError"):
        kept.read(IDS, "")


def test_scales() -> None:
    scaled = side(SOURCE).model_copy(update={"kv_scales": "per_head"})
    with pytest.raises(LayoutError, match="scales"):
        Pages(Path(), "small", scaled, page_tokens=PAGE, layout="layer_first")


def test_hashes() -> None:
    """As SGLang 0.5.23's own ``get_storage_hash_str`` gives them."""
    assert page_hashes(IDS, "", PAGE) == [
        "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
        "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
    ]
    assert page_hashes(IDS, "kvt-sha256:00-s1", PAGE) == [
        "3044100ae25fbcd6546e549534d9303850b0a57766ef54156ded71b1ee7aa36e",
        "3e30959655154e7a807f415cfe28753dd0ba09178fbd5d99a14922d180b49a4a",
    ]
