"""Look at every page of the site in a real browser, in a wide window and in a narrow one.

    python tests/site/browse.py [.cache/site] [--pictures FOLDER]

No page may be wider than its window; tables and code that are scroll in a box of their own. No
figure may be missing or cut, no button may cover code, nothing may fail to load or come from
another host, no error be said on the console. The name of the project leads home. The search finds
a page by its words, from a server and from the disk. ``make test-site`` runs it with the system's
Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, sync_playwright

ROOT = Path(__file__).resolve().parent.parent.parent

#: Windows: a desktop's and a telephone's.
WIDTHS = {"wide": 1280, "narrow": 400}

#: What is wider than the window, but for what lies in a box that scrolls; the innermost elements.
TOO_WIDE = """() => {
    const limit = document.documentElement.clientWidth;
    const scrolls = node => node && node !== document.body && (
        getComputedStyle(node).overflowX !== "visible" || scrolls(node.parentElement));
    const found = [...document.querySelectorAll("header *, main *, footer *")].filter(node => {
        const box = node.getBoundingClientRect();
        return box.width && box.right > limit + 1 && !scrolls(node);
    }).map(node => `${node.tagName} ${node.textContent.trim().slice(0, 60)}`).slice(-3);
    const width = document.documentElement.scrollWidth;
    return width > limit ? [`the page: ${width} pixels`, ...found] : found;
}"""

#: Figures that are not there. Some are loaded when they come into sight only.
MISSING = """async () => {
    const missing = [];
    for (const image of document.images) {
        image.loading = "eager";
        await image.decode().catch(() => missing.push(image.src));
    }
    return missing;
}"""

#: Figures that are wider than what holds them.
CUT = """() => [...document.querySelectorAll("article img")].filter(
    image => image.getBoundingClientRect().width > image.parentElement.clientWidth + 1
).map(image => image.src)"""

#: Code that lies below the button that copies it, by its first words.
COVERED = """() => [...document.querySelectorAll("article pre")].filter(block => {
    const code = block.querySelector("code"), button = block.querySelector("button, .md-code__nav");
    return code && button && code.scrollWidth > code.clientWidth &&
        code.getBoundingClientRect().right > button.getBoundingClientRect().left + 1;
}).map(block => block.textContent.trim().slice(0, 60))"""

#: Commands whose end lies outside of their box, by their first words.
OUTSIDE = """() => [...document.querySelectorAll("article .language-sh code")].filter(
    code => code.scrollWidth > code.clientWidth + 1
).map(code => code.textContent.trim().slice(0, 60))"""

#: Words that are looked for, and the page that has them.
SEARCHED = {"reduce_scatter_single": "reference.html", "CollectiveTimeoutError": "timeouts.html"}


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the folder; yields its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Listener:
    """Notes what goes wrong in a page while it is open."""

    def __init__(self, page: Page, home: str) -> None:
        self.faults: list[str] = []
        self._home = home
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        page.on("request", self._request)
        page.on("requestfailed", lambda request: self.faults.append(f"not loaded: {request.url}"))
        page.on("response", self._response)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self._home, "data:", "blob:")):
            self.faults.append(f"from another host: {request.url}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status}: {response.url}")

    def taken(self) -> list[str]:
        """What has gone wrong since the last time."""
        faults, self.faults = self.faults, []
        return faults


def look(page: Page, url: str) -> Iterator[str]:
    """Open a page and yield what is wrong with it."""
    page.goto(url, wait_until="networkidle")
    yield from (f"too wide: {each}" for each in page.evaluate(TOO_WIDE))
    yield from (f"no figure: {each}" for each in page.evaluate(MISSING))
    yield from (f"a figure is cut: {each}" for each in page.evaluate(CUT))
    yield from (f"code below a button: {each}" for each in page.evaluate(COVERED))
    yield from (f"a command is cut: {each}" for each in page.evaluate(OUTSIDE))
    name = page.locator("header a.md-logo")
    if not name.is_visible():
        yield "the way home cannot be seen"
    elif urlsplit(name.evaluate("link => link.href")).path not in ("/", "/index.html"):
        yield f"the way home leads to {name.get_attribute('href')}"


def search(page: Page, home: str, words: str, expected: str) -> Iterator[str]:
    """Type words into the search as a reader does, and yield what is wrong with the answer."""
    page.goto(home + "index.html", wait_until="networkidle")
    page.keyboard.press("f")
    page.keyboard.type(words)
    page.locator(".md-search-result__link").first.wait_for(timeout=20_000)
    links = page.locator(".md-search-result__link").all()
    found = [urlsplit(str(link.get_attribute("href"))).path.rpartition("/")[2] for link in links]
    if expected not in found:
        yield f"the search for {words} finds {found}, not {expected}"


def search_from_disk(browser: Browser, folder: Path) -> int:
    """Search the site without a server; returns how many faults that has."""
    home = f"{folder.resolve().as_uri()}/"
    page = browser.new_page()
    listener = Listener(page, home)
    faults = [fault for item in SEARCHED.items() for fault in search(page, home, *item)]
    faults += listener.taken()
    page.close()
    for fault in faults:
        print(f"from the disk, the search: {fault}", flush=True)
    return len(faults)


def browse(browser: Browser, home: str, names: list[str], window: str, keep: Path | None) -> int:
    """Look at all pages in one window; returns how many faults they have."""
    page = browser.new_page(viewport={"width": WIDTHS[window], "height": 900})
    listener = Listener(page, home)
    count = 0

    def report(name: str, faults: list[str]) -> None:
        nonlocal count
        count += len(faults)
        for fault in faults:
            print(f"{window}, {name}: {fault}", flush=True)

    for name in names:
        report(name, [*look(page, home + name), *listener.taken()])
        if keep:
            page.screenshot(path=keep / f"{Path(name).stem}-{window}.png", full_page=True)
    for words, expected in SEARCHED.items():
        report("the search", [*search(page, home, words, expected), *listener.taken()])
    page.close()
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("site", type=Path, nargs="?", default=ROOT / ".cache/site")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="leave one of each page")
    arguments = parser.parse_args()
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    program = next(filter(None, programs), None)
    if not program:
        sys.exit("no Chromium on PATH; Debian: apt-get install chromium")
    names = sorted(page.name for page in arguments.site.glob("*.html"))
    if "index.html" not in names:
        sys.exit(f"{arguments.site} is no site: run make docs")
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    with served(arguments.site) as home, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        said = f"{len(names)} pages in {' and '.join(WIDTHS)} windows, Chromium {browser.version}"
        counts = [browse(browser, home, names, each, arguments.pictures) for each in WIDTHS]
        counts.append(search_from_disk(browser, arguments.site))
        browser.close()
    print(f"{said}: {sum(counts) or 'no'} faults")
    return 1 if sum(counts) else 0


if __name__ == "__main__":
    sys.exit(main())
