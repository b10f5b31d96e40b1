"""All settings of the service: defaults, a YAML file, ``KVT_*`` in the environment, arguments."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from service.policy import Policies, Policy

MIB = 1 << 20


class Settings(BaseSettings, Policy):
    """One frozen object; a bad value is an error that names its key. Most of ``Policy`` is here
    as the default of all pairs.

    The YAML file is the one given as ``config`` or named by ``KVT_CONFIG``. What is given as an
    argument wins over the environment, and that over the file.
    """

    model_config = SettingsConfigDict(env_prefix="KVT_", frozen=True, extra="forbid")

    config: Path | None = Field(None, description="YAML file with any of these settings.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65535, description="Port; 0 takes a free one.")
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="Serve /metrics on this port only."
    )
    artifacts: tuple[Path, ...] = Field(
        (), description="Mapper folders, or folders of them; the embedded ones when empty."
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N.")
    threads: int | None = Field(None, ge=1, description="Threads of one translation.")
    preload: tuple[str, ...] = Field(
        (), description="Mappers to load at the start and to keep; all that fit when empty."
    )
    watch_seconds: float | None = Field(
        None, gt=0, description="Look for new and changed artifacts this often; none: never."
    )
    host_memory: int | None = Field(None, ge=1, description="Bytes of host memory for mappers.")
    device_memory: int | None = Field(
        None, ge=1, description="Bytes of the device for mappers, besides host memory on a CPU."
    )
    min_free: int = Field(0, ge=0, description="Bytes of a GPU that are left to other processes.")

    allow_unproven: bool = Field(False, description="Serve mappers without evidence; marked.")
    pairs: dict[str, Policy] = Field(
        {}, description="Changes of the policy by mapper id; in the YAML file."
    )
    state: Path | None = Field(
        None, description="SQLite file for breakers and feedback; they end with us without it."
    )
    feedback_seconds: float = Field(3600, gt=0, description="Time to post an answer's KL.")
    feedback_token: SecretStr | None = Field(
        None, min_length=16, description="Bearer token that /feedback asks for as well."
    )
    buffers: Path | None = Field(
        None, description="Unix socket that hands shared memory out; buffers are off without it."
    )
    buffer_uids: tuple[int, ...] = Field((), description="Users who may ask, beside our own.")
    buffer_bytes: int = Field(32 * 1024 * MIB, ge=1, description="Memory for all buffers.")
    buffer_client_bytes: int = Field(16 * 1024 * MIB, ge=1, description="Most of it for a client.")
    buffer_device_bytes: int | None = Field(
        None, ge=1, description="Bytes of the GPU for buffers, held from the start; none: no such."
    )
    buffer_seconds: float = Field(300, gt=0, description="A buffer that nobody uses ends then.")
    max_sessions: int = Field(100_000, ge=1, description="Sessions whose drift is remembered.")
    session_seconds: float = Field(86_400, gt=0, description="An idle session is forgotten.")

    queue_requests: int = Field(16, ge=1, description="Most requests in flight.")
    queue_seconds: float = Field(
        60, gt=0, allow_inf_nan=False, description="Longest predicted wait for the device."
    )
    max_body_bytes: int = Field(16 * 1024 * MIB, ge=1, description="Largest body.")
    max_header_bytes: int = Field(MIB, ge=2, le=MIB, description="Largest safetensors header.")
    max_inflight_bytes: int = Field(
        32 * 1024 * MIB, ge=1, description="Memory for all requests in flight."
    )
    header_seconds: float = Field(10, gt=0, description="Time for the request's head.")
    body_grace_seconds: float = Field(10, gt=0, description="Waiting that is always granted.")
    body_bytes_per_second: int = Field(MIB, ge=1, description="Least rate after that.")
    drain_seconds: float = Field(30, ge=0, description="Most time for requests at shutdown.")
    drain_notice_seconds: float = Field(
        0, ge=0, description="Keep the port open this long, not ready, before closing it."
    )
    admin_token: SecretStr | None = Field(
        None, min_length=16, description="Switches the admin routes on."
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = Field(True, description="JSON lines; otherwise for people.")

    @model_validator(mode="after")
    def _a_gpu_for_its_buffers(self) -> Self:
        if self.buffer_device_bytes is not None and self.device == "cpu":
            raise ValueError("buffer_device_bytes: the device is cpu")
        return self

    @model_validator(mode="after")
    def _policies_that_certify(self) -> Self:
        Policies(self, self.pairs)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, environment, YAML file."""
        given = init_settings().get("config") or os.environ.get("KVT_CONFIG")
        yaml = [YamlConfigSettingsSource(settings_cls, Path(given))] if given else []
        return (init_settings, env_settings, *yaml)
