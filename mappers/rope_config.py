"""Find the rotary embedding in a model's config, in the new and in the old spelling."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .errors import UnsupportedModel
from .rope_models import PARTIAL, pairing_of
from .rope_parameters import TAKES

_KNOWN = frozenset().union(*TAKES.values()) | {"partial_rotary_factor"}
_THETA_NAMES = ("rope_theta", "rotary_emb_base")  # the second is GPT-NeoX's own


def read_rope(
    config: PretrainedConfig | Mapping[str, Any], layer_type: str | None
) -> dict[str, Any]:
    """The fields of a Rope, as the config has them; see ``Rope.from_config`` for what it raises."""
    if isinstance(config, Mapping):
        config = _config_that_states_theta(config, layer_type)
    pairing = pairing_of(config.model_type)
    if pairing is None:
        raise UnsupportedModel(
            "unknown_rope_pairing",
            f"how models of type {config.model_type} rotate their keys was not verified",
        )
    stated = _stated(config, layer_type)
    rope_type = _rope_type(stated)
    fields = {
        "type": rope_type,
        "theta": _theta(stated),
        "head_dim": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "parameters": _parameters(rope_type, stated),
        "pairing": pairing,
    }
    _check_partial(config.model_type, rope_type, fields["parameters"])
    return fields


def _config_that_states_theta(raw: Mapping[str, Any], layer_type: str | None) -> PretrainedConfig:
    if not any(_states_theta(section) for section in _sections(raw, layer_type)):
        raise _missing_theta()
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or pairing_of(model_type) is None:
        raise UnsupportedModel(
            "unknown_rope_pairing", "the config names no model_type whose pairing was verified"
        )
    # transformers adds to the dicts that it is given
    return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(raw)))


def _sections(raw: Mapping[str, Any], layer_type: str | None) -> Iterator[Mapping[str, Any]]:
    """The places of a ``config.json`` where a theta may stand."""
    yield raw
    for name in ("rope_parameters", "rope_scaling"):
        section = raw.get(name)
        if isinstance(section, Mapping):
            yield section
            nested = section.get(layer_type)
            if isinstance(nested, Mapping):
                yield nested


def _states_theta(section: Mapping[str, Any]) -> bool:
    return any(section.get(name) is not None for name in _THETA_NAMES)


def _stated(config: PretrainedConfig, layer_type: str | None) -> dict[str, Any]:
    """Everything the config says of its rotary embedding, flat."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    stated = dict(given)
    if any(isinstance(value, Mapping) for value in given.values()):
        stated = _of_layer_type(given, layer_type)
    for name in ("rope_theta", "partial_rotary_factor"):
        if stated.get(name) is None:
            stated[name] = getattr(config, name, None)
    return {name: value for name, value in stated.items() if value is not None}


def _of_layer_type(nested: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    section = nested.get(layer_type) if layer_type is not None else None
    if not isinstance(section, Mapping):
        raise UnsupportedModel(
            "rope_differs_by_layer",
            f"the config has a rope for each of {', '.join(sorted(nested))}, not for {layer_type}",
        )
    # transformers reads `truncate` beside the layer types and not within them (5.24, yarn)
    return {**section, "truncate": nested.get("truncate")}


def _rope_type(stated: dict[str, Any]) -> str:
    # "type" is the older name; transformers keeps both and reads the newer
    rope_type = stated.get("rope_type", stated.get("type", "default"))
    if rope_type not in TAKES:
        raise UnsupportedModel(
            "unknown_rope_type", f"this rope type is not one of {', '.join(sorted(TAKES))}"
        )
    return str(rope_type)


def _theta(stated: Mapping[str, Any]) -> float:
    theta = stated.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise _missing_theta()
    return float(theta)


def _missing_theta() -> UnsupportedModel:
    return UnsupportedModel(
        "missing_rope_theta", "the config states no rope_theta, and none is assumed"
    )


def _parameters(rope_type: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that transformers reads for this type; those of other types do nothing."""
    rest = {k: v for k, v in stated.items() if k not in ("rope_type", "type", "rope_theta")}
    unknown = sorted(str(name) for name in rest.keys() - _KNOWN)
    if unknown:
        raise UnsupportedModel(
            "unknown_rope_parameter", f"{len(unknown)} rope parameters are of no known rope type"
        )
    taken = TAKES[rope_type] | {"partial_rotary_factor"}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in rest.items() if k in taken}


def _check_partial(model_type: str, rope_type: str, parameters: Mapping[str, Any]) -> None:
    partial = parameters.get("partial_rotary_factor", 1.0) != 1.0
    if partial and rope_type != "proportional" and model_type not in PARTIAL:
        raise UnsupportedModel(
            "unsupported_partial_rotary",
            f"models of type {model_type} rotate whole heads, but the config asks for a part",
        )
