"""Check every page of the site in a browser, in a wide and a narrow window.

    python tests/site/browse.py [.cache/site]

Checks: no page is wider than its window (tables and code may scroll), no figure is missing or cut,
no request fails or goes to another host, the console has no errors, the
project's name links to the home page, and the search finds pages.
``make test-site`` runs it with the system's Chromium.
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

#: Widths of windows in pixels: desktop and phone.
WIDTHS = {"wide": 1280, "narrow": 400}

#: Innermost elements that are wider than the window and do not scroll.
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

#: Figures that do not load. Lazy figures are loaded first.
MISSING = """async () => {
    const missing = [];
    for (const image of document.images) {
        image.loading = "eager";
        await image.decode().catch(() => missing.push(image.src));
    }
    return missing;
}"""

#: Figures that are wider than their container.
CUT = """() => [...document.querySelectorAll("article img")].filter(
    image => image.getBoundingClientRect().width > image.parentElement.clientWidth + 1
).map(image => image.src)"""

#: First words of commands that are wider than their box.
OUTSIDE = """() => [...document.querySelectorAll("article .language-sh code")].filter(
    code => code.scrollWidth > code.clientWidth + 1
).map(code => code.textContent.trim().slice(0, 60))"""

#: Search words, and the page that has them.
SEARCHED = {"reduce_scatter_single": "reference.html", "CollectiveTimeoutError": "timeouts.html"}


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the folder, and yield its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Listener:
    """Record the faults of an open page."""

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
        """Return the faults since the last call."""
        faults, self.faults = self.faults, []
        return faults


def look(page: Page, url: str) -> Iterator[str]:
    """Open a page and yield its faults."""
    page.goto(url, wait_until="networkidle")
    yield from (f"too wide: {each}" for each in page.evaluate(TOO_WIDE))
    yield from (f"no figure: {each}" for each in page.evaluate(MISSING))
    yield from (f"a figure is cut: {each}" for each in page.evaluate(CUT))
    yield from (f"a command is cut: {each}" for each in page.evaluate(OUTSIDE))
    name = page.locator("header a.md-logo")
    if not name.is_visible():
        yield "the link to the home page is not visible"
    elif urlsplit(name.evaluate("link => link.href")).path not in ("/", "/index.html"):
        yield f"the link to the home page is {name.get_attribute('href')}"


def search(page: Page, home: str, words: str, expected: str) -> Iterator[str]:
    """Search for words, and yield a fault if the expected page is not found."""
    page.goto(home + "index.html", wait_until="networkidle")
    page.keyboard.press("f")
    page.keyboard.type(words)
    page.locator(".md-search-result__link").first.wait_for(timeout=20_000)
    links = page.locator(".md-search-result__link").all()
    found = [urlsplit(str(link.get_attribute("href"))).path.rpartition("/")[2] for link in links]
    if expected not in found:
        yield f"the search for {words} finds {found}, not {expected}"


def browse(browser: Browser, home: str, names: list[str], window: str) -> int:
    """Check all pages in one window; return the number of faults."""
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
    for words, expected in SEARCHED.items():
        report("the search", [*search(page, home, words, expected), *listener.taken()])
    page.close()
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("site", type=Path, nargs="?", default=ROOT / ".cache/site")
    arguments = parser.parse_args()
    programs = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    program = next(filter(None, programs), None)
    if not program:
        sys.exit("no Chromium on PATH; Debian: apt-get install chromium")
    names = sorted(page.name for page in arguments.site.glob("*.html"))
    if "index.html" not in names:
        sys.exit(f"{arguments.site} has no index.html: run make docs")
    with served(arguments.site) as home, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        summary = (
            f"{len(names)} pages in {' and '.join(WIDTHS)} windows, Chromium {browser.version}"
        )
        counts = [browse(browser, home, names, each) for each in WIDTHS]
        browser.close()
    print(f"{summary}: {sum(counts) or 'no'} faults")
    return 1 if sum(counts) else 0


if __name__ == "__main__":
    sys.exit(main())
