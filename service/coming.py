"""The target layers of a translation under way, as they become ready in its caller's buffer."""

from mappers.layouts import Geometry
from service.allocators import Memory
from service.answer import OnLayer
from service.schemas import SideInfo, TranslateRequest
from service.side import Side, tensor_in
from service.wire import laid_out


class Coming:
    """Tells ``on_layer``, whenever it is called, what has become ready in ``memory`` since.

    Before the answer nobody has said how many tokens it holds; the service writes that beside the
    number of layers.
    """

    def __init__(
        self,
        memory: Memory,
        request: TranslateRequest,
        target: SideInfo,
        on_layer: OnLayer,
    ) -> None:
        self._memory, self._request, self._target = memory, request, target
        self._on_layer, self._told = on_layer, 0

    def __call__(self) -> None:
        ready = self._memory.ready_layers or 0
        if self._told < ready <= self._target.num_layers:
            side = self._side(self._memory.ready_tokens)
            specs, _ = laid_out(side.tensors)
            for layer in range(self._told, ready):
                parts = {n: tensor_in(self._memory.data, specs[n]) for n in side.names(layer)}
                self._told = layer + 1
                self._on_layer(layer, *side.layer(parts, layer))

    def _side(self, tokens: int) -> Side:
        target, asked = self._target, self._request
        sizes = target.num_layers, tokens, target.num_kv_heads, target.head_dim
        return Side(asked.layout, Geometry(*sizes, asked.block_tokens), asked.target.storage)
