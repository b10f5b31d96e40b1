"""Find the rotary embedding in a model's config, in the new and in the old spelling."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .errors import UnsupportedModel
from .rope_models import PARTIAL, pairing_of
from .rope_parameters import TAKES

_KNOWN = frozenset().union(*TAKES.values()) | {"partial_rotary_factor"}
# Ministral 3 keeps them with the rope: one scales queries only, the other repeats the config's own
_OF_NO_EFFECT = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})
_TYPE_NAMES = ("rope_type", "type")  # the second is the older one
# GPT-NeoX and the local layers of Gemma 3 have names of their own
_THETA_NAMES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")


def read_rope(
    config: PretrainedConfig | Mapping[str, Any], layer_type: str | None
) -> dict[str, Any]:
    """The fields of a Rope, as the config has them; see ``Rope.from_config`` for what it raises."""
    if isinstance(config, Mapping):
        fields = read_rope(_config_of(config), layer_type)
        # a theta that the file does not contain is the config class's own idea
        if fields["theta"] not in set(_stated_thetas(config)):
            raise _missing_theta()
        return fields
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


def _config_of(raw: Mapping[str, Any]) -> PretrainedConfig:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or pairing_of(model_type) is None:
        raise UnsupportedModel(
            "unknown_rope_pairing", "the config names no model_type whose pairing was verified"
        )
    try:
        # a copy, since transformers adds to the dicts that it is given
        return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(raw)))
    except (KeyError, ValueError, StrictDataclassError) as error:
        raise UnsupportedModel(
            "invalid_rope_parameters", f"transformers refuses this {model_type} config"
        ) from error


def _stated_thetas(raw: Mapping[str, Any]) -> Iterator[float]:
    """Every theta that stands in a ``config.json`` or in its rope sections."""
    for name, value in raw.items():
        if name in _THETA_NAMES and isinstance(value, int | float):
            yield float(value)
        elif isinstance(value, Mapping) and not str(name).endswith("_config"):
            yield from _stated_thetas(value)


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


def _rope_type(stated: Mapping[str, Any]) -> str:
    rope_type = next((stated[name] for name in _TYPE_NAMES if name in stated), "default")
    if not isinstance(rope_type, str) or rope_type not in TAKES:
        raise UnsupportedModel(
            "unknown_rope_type", f"this rope type is not one of {', '.join(sorted(TAKES))}"
        )
    return rope_type


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
    unknown = stated.keys() - _KNOWN - _OF_NO_EFFECT - {*_TYPE_NAMES, "rope_theta"}
    if unknown:
        raise UnsupportedModel(
            "unknown_rope_parameter", f"{len(unknown)} rope parameters are of no known rope type"
        )
    taken = TAKES[rope_type] | {"partial_rotary_factor"}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in stated.items() if k in taken}


def _check_partial(model_type: str, rope_type: str, parameters: Mapping[str, Any]) -> None:
    partial = parameters.get("partial_rotary_factor", 1.0) != 1.0
    if partial and rope_type != "proportional" and model_type not in PARTIAL:
        raise UnsupportedModel(
            "unsupported_partial_rotary",
            f"models of type {model_type} rotate whole heads, but the config asks for a part",
        )
