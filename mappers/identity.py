"""ModelIdentity: everything that must agree before a cache of a model may be used.

Two models that differ in any of these fields compute different keys and values from the same text,
and nothing in the tensors shows it: the answer would be fluent and wrong. So every field is
compared, and a field that a request leaves out means its plain default, not "any".
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from mappers.attention import attention_kinds, decoder_config, head_sizes, key_norm
from mappers.cache import DTYPES
from mappers.errors import IdentityMismatch, LayoutError, UnsupportedModel
from mappers.quantize import ScaleScheme, Storage, StorageDtype
from mappers.rope import Rope

Side = Literal["source", "target"]
ComputeDtype = Literal["float32", "float16", "bfloat16"]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, le=65536)]
Numbers = Annotated[list[float] | tuple[float, ...], Field(max_length=4096)]
RopeValue = bool | int | float | None | Numbers

_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin")
_TOKENIZER_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer")
_READ_BYTES = 1 << 20


class _Sided(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: Name
    version: Name
    dtype: ComputeDtype
    quantization: Name | None = None
    adapter: Name | None = None
    kv_scales: ScaleScheme = "none"
    # Left out where there are none, so that the ids of mappers without any stay what they are.
    kv_zero_points: bool = Field(False, exclude_if=lambda given: not given)


class ModelIdentity(_Sided):
    """One model as a translator must know it.

    ``version`` is an immutable revision or ``weights_digest``; ``architecture`` is transformers'
    ``model_type``; ``dtype`` is what the model computes in, ``kv_dtype`` what its cache stores,
    with scales and zero points as ``mappers/quantize.py`` has them;
    ``k_norm`` says whether keys are normalised before they are rotated; ``attention`` has one kind
    per layer, of which only ``full`` is supported. Raises ``ValidationError`` for anything else.
    """

    architecture: Name
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    rope: Rope
    kv_dtype: StorageDtype
    k_norm: bool
    tokenizer_digest: Name
    attention: tuple[Literal["full"], ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.attention) != self.num_layers:
            raise ValueError("attention: expected one kind for each layer")
        if self.rope.head_dim != self.head_dim:
            raise ValueError("rope.head_dim: expected the same as head_dim")
        try:
            Storage(self.kv_dtype, self.kv_scales, self.kv_zero_points)
        except LayoutError as error:
            raise ValueError(f"kv_dtype and kv_scales: {error}") from error
        return self

    @property
    def storage(self) -> Storage:
        """In which form the cache is stored."""
        return Storage(self.kv_dtype, self.kv_scales, self.kv_zero_points)

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig,
        *,
        model: str,
        version: str,
        dtype: ComputeDtype,
        tokenizer_digest: str,
        kv_dtype: StorageDtype | None = None,
        kv_scales: ScaleScheme = "none",
        kv_zero_points: bool = False,
        adapter: str | None = None,
    ) -> Self:
        """The identity of a model with this config; ``kv_dtype`` is ``dtype`` unless given.

        Raises ``UnsupportedModel`` with a reason word for every cache that cannot be translated
        (``mappers/attention.py`` and ``Rope.from_config`` list them), for a family that is not
        known, and for a config that does not state its rotary embedding.
        """
        decoder = decoder_config(config)
        kinds = attention_kinds(decoder)
        kv_heads, head_dim = head_sizes(decoder)
        k_norm = key_norm(decoder)
        return cls.model_validate(
            {
                "model": model,
                "version": version,
                "architecture": decoder.model_type,
                "num_layers": len(kinds),
                "num_kv_heads": kv_heads,
                "head_dim": head_dim,
                "rope": Rope.from_config(decoder),
                "dtype": dtype,
                "kv_dtype": kv_dtype or dtype,
                "kv_scales": kv_scales,
                "kv_zero_points": kv_zero_points,
                "k_norm": k_norm,
                "quantization": _quantization(config),
                "adapter": adapter,
                "tokenizer_digest": tokenizer_digest,
                "attention": kinds,
            }
        )


class IdentityClaim(_Sided):
    """What a request says of one side.

    ``model``, ``version``, ``rope_theta`` and ``dtype`` are required. A field left out means its
    plain default (no scaling, no adapter, no quantization, a cache stored in ``dtype``) and is
    compared as such; those that default to None from ``architecture`` on follow from the model and
    its version, and are compared only when given.
    """

    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rope_type: Name = "default"
    rope_parameters: Annotated[dict[Name, RopeValue], Field(max_length=32)] = {}
    kv_dtype: StorageDtype | None = None
    architecture: Name | None = None
    num_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    k_norm: bool | None = None
    tokenizer_digest: Name | None = None

    @property
    def storage(self) -> Storage:
        """In which form the cache is said to be stored; ``LayoutError`` for one there is not."""
        return Storage(self.kv_dtype or self.dtype, self.kv_scales, self.kv_zero_points)


_ALWAYS = ("model", "version", "dtype", "quantization", "adapter")
_WHEN_GIVEN = (
    "architecture",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "k_norm",
    "tokenizer_digest",
)


def check(identity: ModelIdentity, claim: IdentityClaim, side: Side) -> None:
    """Compare what a request says with what the mapper was fitted for.

    Raises ``IdentityMismatch`` for the first field that differs, with both values in printable,
    bounded form.
    """
    for field in _ALWAYS:
        _compare(side, field, getattr(identity, field), getattr(claim, field))
    _compare(side, "rope_theta", identity.rope.theta, claim.rope_theta)
    _compare(side, "rope_type", identity.rope.type, claim.rope_type)
    _compare_rope_parameters(identity, claim, side)
    _compare_storage(identity, claim, side)
    for field in _WHEN_GIVEN:
        if getattr(claim, field) is not None:
            _compare(side, field, getattr(identity, field), getattr(claim, field))


def check_pair(source: ModelIdentity, target: ModelIdentity) -> None:
    """Raise ``UnsupportedModel`` unless both sides read the same tokens.

    With another tokenizer the same text has other tokens, so no row of one cache answers to a row
    of the other.
    """
    if source.tokenizer_digest != target.tokenizer_digest:
        raise UnsupportedModel(
            "different_tokenizers", "source and target have different tokenizers"
        )


def weights_digest(path: Path) -> str:
    """``sha256:...`` over the weight files of a folder (or one file), for use as a ``version``.

    Covers each file's name and bytes in the order of the names. Raises ``UnsupportedModel`` when
    there is no weight file.
    """
    files = [path] if path.is_file() else sorted(path.iterdir())
    weights = [file for file in files if file.suffix in _WEIGHT_SUFFIXES and file.is_file()]
    if not weights:
        raise UnsupportedModel("no_weights", "no weight files to take a digest of")
    whole = hashlib.sha256()
    for file in weights:
        whole.update(f"{_file_digest(file)}  {file.name}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """``sha256:...`` over all that decides the token ids of a text.

    That is the model (vocabulary and merges), added tokens, normalizer and pre-tokenizer; not
    padding, truncation or the chat template. Raises ``UnsupportedModel`` for a tokenizer that is
    not backed by the ``tokenizers`` library, whose parts cannot be read.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModel("slow_tokenizer", "a tokenizer of the tokenizers library is needed")
    parts = json.loads(backend.to_str())
    deciding = {name: parts[name] for name in _TOKENIZER_PARTS}
    canonical = json.dumps(deciding, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _compare(side: Side, field: str, expected: object, given: object) -> None:
    if expected != given:
        raise IdentityMismatch(side, field, shown(expected), shown(given))


def _compare_rope_parameters(identity: ModelIdentity, claim: IdentityClaim, side: Side) -> None:
    fitted, stated = identity.rope.parameters, _resolved(identity.rope, claim, side)
    # Those that the request names come first; the others may only be inferred from them.
    for name in sorted(
        {*fitted, *stated}, key=lambda name: (name not in claim.rope_parameters, name)
    ):
        _compare(side, f"rope_parameters.{name}", fitted.get(name), stated.get(name))


def _resolved(fitted: Rope, claim: IdentityClaim, side: Side) -> dict[str, Any]:
    """The stated parameters with what the type infers filled in, as the artifact's are."""
    stated = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in claim.rope_parameters.items()
    }
    try:
        rope = fitted.model_validate({**dict(fitted), "parameters": stated})
    except ValidationError as error:
        given = ", ".join(_printable(name) for name in list(stated)[:8]) or "none"
        expected = ", ".join(sorted(fitted.parameters)) or "none"
        raise IdentityMismatch(side, "rope_parameters", expected, given) from error
    return rope.parameters


def _compare_storage(identity: ModelIdentity, claim: IdentityClaim, side: Side) -> None:
    stated = claim.kv_dtype or claim.dtype
    # A 16 or 32 bit cache is converted without loss that matters; an 8 bit one is other numbers.
    if any(DTYPES[dtype].itemsize == 1 for dtype in (stated, identity.kv_dtype)):
        _compare(side, "kv_dtype", identity.kv_dtype, stated)
    _compare(side, "kv_scales", identity.kv_scales, claim.kv_scales)
    _compare(side, "kv_zero_points", identity.kv_zero_points, claim.kv_zero_points)


def shown(value: object) -> str:
    """A value of an identity as a message may show it: printable, bounded, never raw."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"{len(value)} numbers"
    return _printable(value) if isinstance(value, str) else json.dumps(value)


def _printable(text: str) -> str:
    """At most 64 printable ASCII characters of a string that a caller may have chosen."""
    return "".join(char if " " <= char <= "~" else "?" for char in text[:64])


def _quantization(config: PretrainedConfig) -> str | None:
    stated: Any = getattr(config, "quantization_config", None)
    if not stated:
        return None
    fields = stated if isinstance(stated, dict) else stated.to_dict()
    method = fields.get("quant_method")
    return str(getattr(method, "value", method) or "unknown")


def _file_digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
