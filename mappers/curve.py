"""The layer curve: where in the target do the errors of a translation arise, and do they add up?

Translated keys and values are put into one layer of the native cache at a time, and then into all
layers from 0 up. The founding documents ask for this curve of every mapper.
"""

from collections.abc import Iterator
from typing import Literal

from torch import Tensor

from mappers.arms import Reading, read_tail
from mappers.cache import KVCache
from mappers.evidence_rows import CurveRow
from mappers.metrics import Reference
from mappers.models import LoadedModel

BATCH = 8
Mode = Literal["one", "up_to"]
Layers = tuple[Tensor, ...]


def layer_curve(
    target: LoadedModel, reading: Reading, *, document: str, domain: str, tail: int
) -> Iterator[CurveRow]:
    """Both curves of one document at its longest prompt, with a native tail of ``tail`` tokens."""
    length = max(reading.lengths)
    at = reading.lengths.index(length)
    reference = Reference(reading.native_logits[at], reading.next_ids(length))
    layers = range(reading.native.num_layers)
    steps: list[tuple[Mode, int]] = [("one", n) for n in layers]
    steps += [("up_to", n) for n in layers]
    for start in range(0, len(steps), BATCH):
        batch = steps[start : start + BATCH]
        mixed = [_mixed(reading, mode, layer) for mode, layer in batch]
        logits = read_tail(target, mixed, reading.ids, length=length, tail=tail)
        for (mode, layer), answer in zip(batch, logits, strict=True):
            found = reference.compare(answer)
            yield CurveRow(
                document=document,
                domain=domain,
                length=length,
                native_tail=tail,
                mode=mode,
                layer=layer,
                kl=found.kl,
                top1=found.top1,
            )


def _mixed(reading: Reading, mode: Mode, layer: int) -> KVCache:
    """The native cache with translated layers in it, in its dtype."""
    native, mapped = reading.native, reading.prefix_known.slice(0, reading.native.tokens)
    first = layer if mode == "one" else 0

    def mix(own: Layers, other: Layers) -> Layers:
        # What is read from 8 bits is float32, whatever the target computes in and reads it as.
        put = (tensor.to(native.dtype) for tensor in other[first : layer + 1])
        return (*own[:first], *put, *own[layer + 1 :])

    return KVCache(
        mix(native.keys, mapped.keys), mix(native.values, mapped.values), native.positions
    )
