"""A page as a reader finds it: its tags, its words, and the tables of each section."""

from html.parser import HTMLParser

Cells = list[list[str]]


class Page(HTMLParser):
    """Tags that are opened and closed in turn, all attributes, and tables as text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.tables: dict[str, list[Cells]] = {}
        self.plots: dict[str, int] = {}
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        elif tag == "svg":
            self.plots[self._section] = self.plots.get(self._section, 0) + 1
        elif tag == "table":
            self.tables.setdefault(self._section, []).append([])
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th"):
            self._table[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if "td" in self.open or "th" in self.open:
            self._table[-1][-1] += data

    @property
    def _table(self) -> Cells:
        return self.tables[self._section][-1]
