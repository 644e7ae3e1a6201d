"""Draws the pictures of the documents from pages of plans, which `tarantella plan make` writes.

    python docs/pictures.py          # rewrites plan.svg, stages.svg and schedules.svg

Parts of a page stand in a picture as they are, so it is as sharp as text, and dark where the
document is. Its size is that of the page in a window of 1280 pixels.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tarantella_pp.cli.main import main as tarantella

PICTURES = Path(__file__).resolve().parent / "pictures"
COSTS = {"forward_seconds": 0.001, "backward_seconds": 0.002, "parameters": 4}
EVEN = {
    "directed": True,
    "graph": {"name": "even"},
    "nodes": [{"id": name, **COSTS} for name in "abcd"],
    "edges": [{"source": one, "target": other, "bytes": 1} for one, other in ("ab", "bc", "cd")],
}
"""Four operations that take equally long, twice as long backward as forward."""


def main() -> None:
    """Draws the page of the demo's plan, and the timelines of three schedules."""
    with tempfile.TemporaryDirectory() as folder:
        page = page_of(folder, "tarantella_pp.demo:build_model")
        draw("plan", page, part(page, "<h1>", "<section><h2>Operations"), height=1280)
        draw(
            "stages", page, part(page, '<div class="pair">', "<section><h2>Operations"), height=700
        )
        even = Path(folder, "even.json")
        even.write_text(json.dumps(EVEN), encoding="utf-8")
        lines = ""
        for name in ("gpipe", "1f1b", "zb-h1"):
            page = page_of(folder, str(even), "--schedule", name, "--machine", "v100")
            line = part(page, "<section><h2>Timeline", "<section><h2>Operations")
            lines += line.replace("<h2>Timeline", f"<h2>{name}")
        draw("schedules", page, lines, height=1020)


def page_of(folder: str, *arguments: str) -> str:
    """Plans a model on four stages; returns the page of the plan."""
    path = Path(folder, "plan.html")
    options = ["--stages", "4", "--micro-batches", "8", "--html", str(path)]
    if tarantella(["plan", "make", *arguments, *options]):
        raise SystemExit(1)
    return path.read_text(encoding="utf-8")


def part(page: str, start: str, end: str) -> str:
    """Cuts a part out of a page."""
    return page[page.index(start) : page.index(end)]


def draw(name: str, page: str, shown: str, height: int) -> None:
    """Writes parts of a page as a picture."""
    style = part(page, "<style>", "</head>")
    size = f'width="1280" height="{height}"'
    shown = shown.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    (PICTURES / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1280 {height}" {size}>{style}'
        f'<foreignObject {size}><body xmlns="http://www.w3.org/1999/xhtml" style="height:100%">'
        f"<main>{shown}</main></body></foreignObject></svg>\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
