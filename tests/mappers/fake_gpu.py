"""What a GPU does otherwise, on a CPU: streams that keep account, products of 16-bit numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from mappers import translate

Operation = tuple[str, int]


class FakeStream:
    """``before``: all operations that are certain to be done before what is queued next."""

    def __init__(self) -> None:
        self.before: set[Operation] = set()

    def record_event(self) -> frozenset[Operation]:
        return frozenset(self.before)

    def wait_event(self, event: frozenset[Operation]) -> None:
        self.before |= event


class FakeStreams:
    """A device whose operations are done at once, but ordered only as far as events say so."""

    def __init__(self) -> None:
        self.copies, self.compute = FakeStream(), FakeStream()
        self.copies.synchronize = self._synchronize  # type: ignore[attr-defined]
        self.before_copy: list[frozenset[Operation]] = []
        self.synchronized = 0

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.before_copy.append(frozenset(self.copies.before))
        yield
        self.copies.before.add(("copy", len(self.before_copy) - 1))

    def holds(self, tensor: Tensor) -> bool:
        return False

    def _synchronize(self) -> None:
        self.synchronized += 1


class LateStreams(FakeStreams):
    """A copy is made when the host waits for it, which is as late as a GPU may make it."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        def later(there: Tensor, here: Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            self.late.append((there, here))

        with super().copying(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "copy_", later)
            yield

    def _synchronize(self) -> None:
        super()._synchronize()
        for there, here in self.late:
            there.copy_(here)
        self.late.clear()


def compute_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have translators on the CPU keep weights and content in bfloat16 and sum in float32, with a
    stand-in for the one operation that only GPUs have."""
    bmm = torch.bmm

    def mixed(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert (a.dtype, b.dtype, out_dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        assert out.stride(2) == 1  # or it would go through memory of its own
        return bmm(a.float(), b.float(), out=out)

    monkeypatch.setattr(torch, "bmm", mixed)
    monkeypatch.setattr(translate, "_compute_dtype", lambda device, asked: torch.bfloat16)
