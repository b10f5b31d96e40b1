"""One spelling for the parameters of a rope type, whatever spelling they were given in."""

import math
from collections.abc import Callable, Mapping

Parameter = bool | int | float | tuple[float, ...] | None
Parameters = Mapping[str, Parameter]
Resolved = dict[str, Parameter]


def resolve(rope_type: str, given: Parameters, *, max_position_embeddings: int) -> Resolved:
    """The parameters with everything that transformers infers filled in.

    Values that are None count as not given. Raises ValueError for a parameter that the type needs
    and lacks, does not take, or that has no usable value.
    """
    rest = {name: value for name, value in given.items() if value is not None}
    rotary_share = _number("partial_rotary_factor", rest.pop("partial_rotary_factor", 1.0))
    unknown = sorted(rest.keys() - TAKES[rope_type])
    if unknown:
        raise ValueError(f"rope type {rope_type} does not take {', '.join(unknown)}")
    resolved = _RESOLVERS[rope_type](rest, max_position_embeddings)
    if rotary_share > 1:
        raise ValueError("partial_rotary_factor must be at most 1")
    if rotary_share < 1:
        resolved["partial_rotary_factor"] = rotary_share
    return resolved


def _default(given: Parameters, longest: int) -> Resolved:
    return {}


def _factor(given: Parameters, longest: int) -> Resolved:
    return {"factor": _need("factor", given)}


def _proportional(given: Parameters, longest: int) -> Resolved:
    return {"factor": _number("factor", given.get("factor", 1.0))}


def _llama3(given: Parameters, longest: int) -> Resolved:
    low, high = _need("low_freq_factor", given), _need("high_freq_factor", given)
    if high <= low:
        raise ValueError("high_freq_factor must be above low_freq_factor")
    factor = _need("factor", given)
    return {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        **_original(given),
    }


def _yarn(given: Parameters, longest: int) -> Resolved:
    """YaRN, arXiv 2309.00071; the attention factor is its own, or DeepSeek's ratio of two."""
    original = _original(given)
    factor = _stretch(given, original, longest)
    return {
        "factor": factor,
        "attention_factor": _yarn_attention(given, factor),
        "beta_fast": _number("beta_fast", given.get("beta_fast") or 32.0),
        "beta_slow": _number("beta_slow", given.get("beta_slow") or 1.0),
        "truncate": _flag("truncate", given.get("truncate", True)),
        **original,
    }


def _yarn_attention(given: Parameters, factor: float) -> float:
    if "attention_factor" in given:
        return _need("attention_factor", given)
    if given.get("mscale") and given.get("mscale_all_dim"):
        above, below = _need("mscale", given), _need("mscale_all_dim", given)
        return _yarn_scale(factor, above) / _yarn_scale(factor, below)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(given: Parameters, longest: int) -> Resolved:
    """LongRoPE, arXiv 2402.13753, with the attention factor of the Phi-3 release."""
    original = _original(given)
    attention = given.get("attention_factor")
    if attention is None:
        factor = _stretch(given, original, longest)
        attention = (
            math.sqrt(1 + math.log(factor) / math.log(original["original_max_position_embeddings"]))
            if factor > 1
            else 1.0
        )
    return {
        "short_factor": _table("short_factor", given),
        "long_factor": _table("long_factor", given),
        "attention_factor": _number("attention_factor", attention),
        **original,
    }


def _stretch(given: Parameters, original: dict[str, int], longest: int) -> float:
    """The factor; where a config gives none, how much longer the model is than it was trained."""
    if "factor" in given:
        return _need("factor", given)
    return longest / original["original_max_position_embeddings"]


def _original(given: Parameters) -> dict[str, int]:
    name = "original_max_position_embeddings"
    value = _need(name, given)
    if value < 2 or value != int(value):
        raise ValueError(f"{name} must be a whole number of at least 2")
    return {name: int(value)}


def _need(name: str, given: Parameters) -> float:
    if name not in given:
        raise ValueError(f"this rope type needs {name}")
    return _number(name, given[name])


def _number(name: str, value: Parameter) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be finite and above 0")
    return float(value)


def _flag(name: str, value: Parameter) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false")
    return value


def _table(name: str, given: Parameters) -> tuple[float, ...]:
    value = given.get(name)
    if not isinstance(value, tuple):
        raise ValueError(f"this rope type needs {name}, one number for each rotated pair")
    return tuple(_number(name, entry) for entry in value)


_RESOLVERS: dict[str, Callable[[Parameters, int], Resolved]] = {
    "default": _default,
    "linear": _factor,
    "dynamic": _factor,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

# everything but theta and the rotary share, which every type takes
TAKES: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "proportional": frozenset({"factor"}),
    "llama3": frozenset(
        "factor low_freq_factor high_freq_factor original_max_position_embeddings".split()
    ),
    "yarn": frozenset(
        "factor attention_factor mscale mscale_all_dim beta_fast beta_slow truncate "
        "original_max_position_embeddings".split()
    ),
    "longrope": frozenset(
        "short_factor long_factor factor attention_factor original_max_position_embeddings".split()
    ),
}
