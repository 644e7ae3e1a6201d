"""Looks at the pages in Chromium as readers do: on a screen and on a phone, in light and in dark.

    python docs/check_pages.py                                  # builds the pages first
    python docs/check_pages.py docs/_build --pictures looks     # keeps what they look like

Lists what a page does wrong: it scrolls sideways, logs an error, has too many words, no search, no
dark colours, or a link or a picture that leads nowhere. Needs `chromium` and `chromedriver`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

DOCS = Path(__file__).resolve().parent
MOST_WORDS, REFERENCE = 1500, "api"
FLAGS = [
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
    "disable-background-networking", "disable-component-update",
]  # fmt: skip
LOOK = """
const article = document.querySelector("article");
const boxes = [document.scrollingElement, document.querySelector(".content")];
const colour = getComputedStyle(document.body).backgroundColor.match(/\\d+/g);
return {
  wide: Math.max(...boxes.map(box => box.scrollWidth - box.clientWidth)),
  words: article ? article.innerText.split(/\\s+/).length : 0,
  search: document.querySelector("input[name=q]") !== null,
  scheme: +colour[1] < 128 ? "dark" : "light",
  broken: [...document.images].filter(i => !i.naturalWidth).map(i => i.getAttribute("src")),
  links: [...document.links].map(a => a.href),
  names: [...document.querySelectorAll("[id]")].map(e => e.id),
};"""
FOUND = "return [...document.querySelectorAll('ul.search a')].map(a => a.href).join();"


def main() -> int:
    """Prints what is wrong; returns 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="?", type=Path, help="folder of built pages")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the pages")
    args = parser.parse_args()
    if missing := [name for name in ("chromium", "chromedriver") if not shutil.which(name)]:
        sys.exit(f"check_pages.py needs {' and '.join(missing)}: not found on PATH.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        built = args.pages or Path(folder, "pages")
        if not args.pages:
            subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", DOCS, built], check=True)
        pages = sorted(p for p in built.resolve().rglob("*.html") if "_static" not in p.parts)
        if not pages:
            sys.exit(f"check_pages.py found no pages in {built}.")
        with browser(folder) as ask:
            wrong = [*look_at(ask, pages, args.pictures), *search_for("bubble", ask, pages)]
    sys.stdout.write("\n".join([*wrong, f"{len(pages)} pages, {len(wrong)} faults\n"]))
    return int(bool(wrong))


@contextlib.contextmanager
def browser(folder: str) -> Iterator[Callable[..., Any]]:
    """Starts Chromium; yields what sends it a command of the WebDriver protocol."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    port = next(line for line in driver.stdout if "successfully on port" in line).split()[-1]
    connection = http.client.HTTPConnection("127.0.0.1", int(port.rstrip(".")), timeout=60)
    session = "/session"

    def ask(command: str, method: str = "POST", **body: Any) -> Any:
        connection.request(method, session + command, json.dumps(body) if method == "POST" else "")
        value = json.load(connection.getresponse())["value"]
        if value and "error" in value:
            raise RuntimeError(value["message"])
        return value

    try:
        flags = [*FLAGS, f"user-data-dir={folder}/chromium"]
        options = {"binary": shutil.which("chromium"), "args": flags}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "SEVERE"}}
        session += "/" + ask("", capabilities={"alwaysMatch": wanted})["sessionId"]
        yield ask
        ask("", "DELETE")
    finally:
        driver.terminate()
        driver.wait()


def look_at(ask: Callable[..., Any], pages: list[Path], pictures: Path | None) -> Iterator[str]:
    """Opens every page in every way; yields what is wrong."""
    names: dict[str, list[str]] = {}
    links: dict[str, str] = {}
    for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        ask("/goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=size)
        ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})
        for page in pages:
            ask("/url", url=page.as_uri())
            seen = ask("/execute/sync", script=LOOK, args=[])
            logged = [line["message"] for line in ask("/se/log", type="browser")]
            for fault in [*faults(page.stem, scheme, seen), *logged]:
                yield f"{page.stem}, {width} pixels, {scheme}: {fault}"
            names[page.as_uri()] = seen["names"]
            links |= dict.fromkeys(seen["links"], page.stem)
            if pictures:
                pictures.mkdir(exist_ok=True)
                picture = base64.b64decode(ask("/screenshot", "GET"))
                (pictures / f"{page.stem}-{width}-{scheme}.png").write_bytes(picture)
    for link, page in links.items():
        url, name = urldefrag(link)
        known = names.get(url) if url.endswith(".html") else []
        there = known is not None and (not name or unquote(name) in known)
        if url.startswith("file:") and not (there and Path(unquote(url[7:])).exists()):
            yield f"{page}: {link} leads nowhere"


def faults(page: str, scheme: str, seen: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with a page that is open."""
    if seen["wide"] > 0:
        yield f"scrolls sideways, by {seen['wide']} pixels"
    if seen["words"] > MOST_WORDS and page != REFERENCE:
        yield f"{seen['words']} words, more than {MOST_WORDS}"
    if not seen["search"]:
        yield "no search"
    if seen["scheme"] != scheme:
        yield f"is {seen['scheme']}"
    yield from (f"{picture} is no picture" for picture in seen["broken"])


def search_for(word: str, ask: Callable[..., Any], pages: list[Path]) -> Iterator[str]:
    """Searches as a reader does."""
    ask("/url", url=f"{pages[0].parent.as_uri()}/search.html?q={word}")
    for _ in range(50):  # a script of the page searches
        time.sleep(0.1)
        if "schedules.html" in ask("/execute/sync", script=FOUND, args=[]):
            return
    yield f"search: {word!r} does not lead to the page of schedules"


if __name__ == "__main__":
    sys.exit(main())
