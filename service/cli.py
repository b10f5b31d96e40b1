"""``kvt``, the command line: translate KV caches, and make and check what that needs."""

from collections.abc import Callable

import typer

from service.commands.bench import bench
from service.commands.bridge import bridge
from service.commands.demo import demo
from service.commands.doctor import doctor
from service.commands.evaluate import evaluate
from service.commands.exits import OneLineErrors
from service.commands.fit import fit
from service.commands.inspect import inspect
from service.commands.serve import serve
from service.commands.translate import translate
from service.commands.verify import verify
from service.commands.vsr import export, import_

app = typer.Typer(
    name="kvt",
    help="Translate one model's KV cache into another's, or say re-prefill.",
    epilog="Exit codes: 2 usage, 3 unsupported or another model, 4 artifact, 5 data, 6 server, "
    "10 the decision is re-prefill, 130 interrupted.",
    cls=OneLineErrors,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"auto_envvar_prefix": "KVT", "help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    add_completion=False,
)

_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Use": (demo, serve, translate),
    "Make": (fit, evaluate),
    "Look at": (bench, doctor, inspect, verify),
    "Exchange": (export, import_),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(_command.__name__.rstrip("_"), rich_help_panel=_panel)(_command)
app.add_typer(bridge, rich_help_panel="Exchange")


def main() -> None:
    """Entry point of the ``kvt`` script."""
    app(prog_name="kvt")


if __name__ == "__main__":
    main()
