"""``kvt demo``: see it work, from a server process to the continuation of a text."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from service.commands.exits import Code, Failure
from service.commands.options import Config

_CURL = """\
curl --data-binary @{file} -H 'Content-Type: application/vnd.safetensors' \\
     http://127.0.0.1:8080/translate -o answer.safetensors -D -"""


def demo(
    config: Config = None,
    tokens: Annotated[int, typer.Option(min=128, help="Length of the prompts.")] = 512,
    prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 8,
    write_request: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Only write a request to this file, for curl or kvt translate."
        ),
    ] = None,
    family: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            show_default="the embedded one",
            help="Folder with the two models, artifacts/ and text/.",
        ),
    ] = None,
) -> None:
    """Start a real server, translate real prompts both ways, and compare.

    Ends with exit code 10 unless every prompt was translated, with a KL below that of reading only
    the prompt's last 64 tokens.
    """
    from transformers.utils.logging import disable_progress_bar

    from service.demo import family as families
    from service.demo.run import run, write

    del config
    disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = family or families.EMBEDDED
    console = Console()
    if write_request is not None:
        write(folder, write_request, tokens)
        console.print(f"Send it to a running service (make serve):\n\n{_curl(write_request)}")
        return
    good = run(console, folder, tokens=tokens, prompts=prompts)
    command = Path(sys.argv[0])
    kvt = str(command) if command.name == "kvt" else "kvt"
    console.print(
        f"Keep it running:\n\n    make serve\n\nand in another terminal:\n\n"
        f"    {kvt} demo --write-request request.safetensors\n    "
        + _curl(Path("request.safetensors")).replace("\n", "\n    "),
        highlight=False,
        soft_wrap=True,
    )
    if not good:
        raise Failure(Code.REPREFILL, "not every prompt was translated well")


def _curl(file: Path) -> str:
    return _CURL.format(file=file)
