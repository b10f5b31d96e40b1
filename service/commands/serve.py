"""``kvt serve``: one process, one application, until a signal says stop."""

import inspect
import socket
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import SettingsError

from service.commands.exits import Code, Failure, fault_of
from service.commands.options import read_yaml
from service.settings import Settings


def serve(context: typer.Context, **_values: Any) -> None:
    """Run the service: POST a KV cache to /translate, read /docs for everything else.

    Logs go to standard output. SIGTERM and Ctrl-C stop it when the requests in flight are done.
    """
    from service.server import run

    settings = settings_of(context)
    with listen(settings) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"kvt: listening on http://{shown}:{port} (Ctrl-C stops it)", err=True)
        run(settings, listener)


def settings_of(context: typer.Context) -> Settings:
    """Settings with what the command line gives; they read environment and file themselves."""
    given = {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    if context.params["config"] is not None:
        read_yaml(context.params["config"])
    return settings_from(**given)


def settings_from(**given: Any) -> Settings:
    """Settings with these values. Raises Failure (usage), also for a value from elsewhere."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise Failure(Code.USAGE, fault_of(error)) from error
    except SettingsError as error:
        raise Failure(Code.USAGE, "an environment variable of KVT_ is not valid JSON") from error


def listen(settings: Settings) -> socket.socket:
    """The listening socket; port 0 takes a free one. Raises Failure (server)."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        place = f"{settings.host}:{settings.port}"
        raise Failure(Code.SERVER, f"cannot listen on {place}: {error.strerror}") from error


_ANNOTATED: Any = Annotated


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """A setting as an option, so that the two can never differ."""
    info = typer.Option(
        help=field.description,
        envvar=f"KVT_{name.upper()}",
        exists=name == "config",
        rich_help_panel=_PANELS.get(name, "Limits"),
    )
    kind = _ANNOTATED[_plain(field.annotation) | None, info]
    default = None if field.default == () else field.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _plain(annotation: Any) -> Any:
    """What typer reads for a setting's type: no None, no tuple, no secret."""
    members = [kind for kind in get_args(annotation) if kind is not type(None)]
    if type(None) in get_args(annotation):
        annotation = members[0]
    if annotation is SecretStr:
        return str
    if get_origin(annotation) is tuple:
        return list[_bare(get_args(annotation)[0])]  # type: ignore[misc]
    return _bare(annotation)


def _bare(annotation: Any) -> Any:
    """A type without what pydantic checks about it: the settings do that."""
    return annotation.__origin__ if get_origin(annotation) is Annotated else annotation


_GROUPS = {
    "Where and what": ("config", "host", "port", "metrics_port", "artifacts", "device", "threads"),
    "What is loaded": (
        "preload",
        "watch_seconds",
        "host_memory",
        "device_memory",
        "min_free",
    ),
    "When a translation is good enough": (
        "max_kl",
        "risk",
        "alpha",
        "delta",
        "kl_clip",
        "default_domain",
        "trust_domain",
        "allow_unproven",
        "domains",
        "native_tails",
        "reprefill_tokens_per_second",
        "min_rows_an_input",
        "drift_budget",
    ),
    "When earlier answers were not good enough": (
        "state",
        "shadow_rate",
        "breaker_eps",
        "breaker_delta",
        "breaker_close_delta",
        "breaker_cool_down_seconds",
        "breaker_probes",
        "breaker_quorum",
        "feedback_seconds",
        "feedback_token",
    ),
    "Shared memory for clients on this host": (
        "buffers",
        "buffer_uids",
        "buffer_bytes",
        "buffer_client_bytes",
        "buffer_device_bytes",
        "buffer_seconds",
    ),
    "Operation": ("admin_token", "log_level", "log_json", "drain_seconds", "drain_notice_seconds"),
}
# Settings that have more than one value in them.
_FILE_ONLY = {"pairs"}
_PANELS = {name: panel for panel, names in _GROUPS.items() for name in names}

serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(_option(n, field) for n, field in Settings.model_fields.items() if n not in _FILE_ONLY),
    ]
)
