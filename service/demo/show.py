"""The demonstration's tables."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from service.commands.inspect import percent
from service.demo.measure import BARE_TAIL, Result


def show(console: Console, results: Sequence[Result]) -> None:
    """The figures of all directions side by side, then the texts of each."""
    first = results[0]
    table = Table(
        title=f"{first.prompt_tokens} tokens of held-out text, translated over HTTP",
        caption=f"means over {len(first.readings)} prompts, times are medians; "
        "KL in nats a token against the target's own cache",
    )
    table.add_column("")
    for result in results:
        table.add_column(result.direction.label, justify="right")
    columns = [_figures(result) for result in results]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)
    for result in results:
        console.print(_texts(result))


def _figures(result: Result) -> dict[str, str]:
    receipts = [answer.receipt for answer in result.translated]
    bounds = sorted(r.kl_bound for r in receipts if r.kl_bound is not None)
    rules = {f"for {1 - r.alpha:.0%} of prompts, {1 - r.delta:.0%} sure" for r in receipts}
    return {
        "decision": _decision(result),
        "tokens translated": _each({r.tokens for r in receipts}),
        "native tail, read by the target": _each({r.native_tail for r in receipts}),
        "KL, translated": f"[bold]{result.mean('translated'):.4f}[/]",
        "  certified bound": f"{bounds[-1]:.4f}" if bounds else "-",
        "  which holds": ", ".join(sorted(rules)) or "-",
        f"KL, only the last {BARE_TAIL} tokens read": f"{result.mean('bare'):.4f}",
        "KL, only the native tail read": f"{result.mean('bare_same_tail'):.4f}",
        "KL, no context": f"{result.mean('no_context'):.4f}",
        "top-1 agreement": percent(result.mean("translated", "top1")),
        "gap recovered": percent(result.gap),
        "context recovered": percent(result.context),
        "translate, HTTP round trip": f"{result.round_trip_ms:.1f} ms",
        "  of which the server translates": f"{result.server_ms:.1f} ms",
        "target's own prefill": f"{result.prefill_ms:.1f} ms",
    }


def _decision(result: Result) -> str:
    if not result.refused:
        return f"translate ({len(result.translated)} of {len(result.readings)})"
    reasons = ", ".join(sorted({r.reason for r in result.refused}))
    return f"reprefill: {reasons} ({len(result.refused)} of {len(result.readings)})"


def _each(numbers: set[int]) -> str:
    return ", ".join(str(n) for n in sorted(numbers)) or "-"


def _texts(result: Result) -> Table:
    table = Table(title=f"{result.direction.label}: greedy continuations", show_lines=True)
    table.add_column("")
    table.add_column("text", overflow="fold")
    for name, text in result.texts._asdict().items():
        table.add_row(_TEXT_NAMES[name], _one_line(text))
    return table


_TEXT_NAMES = {
    "prompt": "... the prompt's end",
    "native": "target, native",
    "translated": "target, translated",
    "source": "source alone",
}


def _one_line(text: str) -> str:
    # Brackets would be read as markup.
    return " ".join(text.split()).replace("[", r"\[")
