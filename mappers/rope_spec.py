"""What a model's rotary embedding is: type, theta and every parameter, resolved."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor
from transformers import PretrainedConfig

from .errors import UnsupportedModel
from .rope_config import read_rope
from .rope_frequencies import RopeSettings, inverse_frequencies
from .rope_models import Pairing
from .rope_parameters import Parameter, resolve

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]


class Rope(BaseModel):
    """One rotary embedding; equal ones rotate alike.

    ``parameters`` holds everything beyond type and theta in one spelling: what transformers would
    infer is filled in (YaRN's and LongRoPE's ``attention_factor``, YaRN's betas and truncation),
    what has no further effect (``mscale``, a rotary share of 1.0) is left out. So the plain default
    type has none. ValidationError names a parameter that the type needs and lacks, does not take,
    or that gives no usable frequencies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: RopeType
    theta: float = Field(gt=0, allow_inf_nan=False)
    head_dim: int = Field(ge=2)
    max_position_embeddings: int = Field(ge=1)
    parameters: dict[str, Parameter] = {}
    pairing: Pairing = "half"

    @classmethod
    def from_config(
        cls, config: PretrainedConfig | Mapping[str, Any], *, layer_type: str | None = None
    ) -> Self:
        """Read the rotary embedding of a transformers config, or of a ``config.json`` as a dict.

        The new ``rope_parameters`` (also nested by layer type, then ``layer_type`` chooses) and the
        old ``rope_theta`` with ``rope_scaling`` are both read. Nothing is defaulted here, but a
        config *object* may have been before: transformers 5 classes fill in a theta of their own
        (``LlamaConfig()`` has 10000) and afterwards nobody can tell. Such a theta is what that
        model object really uses. Whoever needs the checkpoint itself to state it gives the dict.

        Raises UnsupportedModel with the reason ``unknown_rope_pairing``, ``missing_rope_theta``,
        ``unknown_rope_type``, ``rope_differs_by_layer``, ``unknown_rope_parameter``,
        ``unsupported_partial_rotary`` or ``invalid_rope_parameters``.
        """
        fields = read_rope(config, layer_type)
        try:
            return cls(**fields)
        except ValidationError as error:
            fault = error.errors(include_input=False, include_url=False)[0]
            field = ".".join(str(part) for part in fault["loc"]) or "rope"
            raise UnsupportedModel("invalid_rope_parameters", f"{field}: {fault['msg']}") from error

    @property
    def rotary_dim(self) -> int:
        """How many leading elements of each head are rotated; even, at most ``head_dim``."""
        share = self.parameters.get("partial_rotary_factor", 1.0)
        # the proportional type rotates the rest too, with frequency 0
        if self.type == "proportional" or not isinstance(share, float):
            return self.head_dim
        return int(self.head_dim * share)

    def frequencies(self, *, length: int | None = None) -> tuple[Tensor, float]:
        """Radians per position, float32 ``[rotary_dim/2]`` on the CPU; the factor on cos and sin.

        ``length`` is that of the whole sequence in tokens; only ``dynamic`` and ``longrope`` use
        it.
        """
        settings = RopeSettings(
            {"rope_theta": self.theta, **self.parameters},
            self.head_dim,
            self.max_position_embeddings,
        )
        return inverse_frequencies(self.type, settings, length=length)

    def __hash__(self) -> int:
        items = tuple(sorted(self.parameters.items()))
        return hash((self.type, self.theta, self.head_dim, self.max_position_embeddings, items))

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        resolved = resolve(
            self.type, self.parameters, max_position_embeddings=self.max_position_embeddings
        )
        # in place: the dict is this object's own, made by the validation that just ran
        self.parameters.clear()
        self.parameters.update(resolved)
        self._check_frequencies()
        return self

    def _check_frequencies(self) -> None:
        pairs, odd = divmod(self.rotary_dim, 2)
        if pairs == 0 or odd:
            raise ValueError(f"the rotated part of a head must be even, not {self.rotary_dim}")
        for name in ("short_factor", "long_factor"):
            table = self.parameters.get(name)
            if isinstance(table, tuple) and len(table) != pairs:
                raise ValueError(f"{name} has {len(table)} entries for {pairs} rotated pairs")
        try:
            inv_freq, scaling = self.frequencies()
        except (ArithmeticError, ValueError) as error:
            raise ValueError("the rope parameters give no frequencies") from error
        if not (bool(torch.isfinite(inv_freq).all()) and math.isfinite(scaling)):
            raise ValueError("the rope parameters give frequencies that are not finite")
