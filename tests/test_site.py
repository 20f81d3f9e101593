"""The reference site: built without a warning, then read in a browser."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd
import pytest
from registry import ROOT, ROWS, RULER, SCRIPTS

pytestmark = pytest.mark.e2e
HTML = ROOT / "site" / "html"


@pytest.fixture(scope="module")
def site() -> Path:
    """Its folder, built once by whichever process of pytest comes first."""
    pytest.importorskip("material", reason="no MkDocs here (--group docs)")
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    with open(Path(tempfile.gettempdir()) / f"site-{run}", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if lock.seek(0, os.SEEK_END) == 0:
            command = [sys.executable, str(ROOT / "site" / "build.py")]
            built = subprocess.run(command, capture_output=True, text=True)
            assert built.returncode == 0, built.stderr
            assert "WARNING" not in built.stdout + built.stderr
            lock.write("built")
    return HTML


class Page(HTMLParser):
    """Ids and links of a page, and the code in its blocks of a script."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links, self.blocks, self.is_code = set(), [], [], False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get("id"))
        self.links += [(tag, attrs[x]) for x in ("href", "src") if attrs.get(x)]
        if tag == "pre":
            self.is_code = "script" in attrs.get("class", "")
            self.blocks += [""] * self.is_code

    def handle_endtag(self, tag):
        self.is_code &= tag != "pre"

    def handle_data(self, data):
        if self.is_code:
            self.blocks[-1] += data


def test_links_have_targets_and_nothing_is_loaded_from_elsewhere(site):
    paths = [path for path in site.rglob("*.html") if path.name != "404.html"]
    pages = {path.resolve(): Page(path) for path in paths}
    assert len(pages) > 2 * len(ROWS)
    dead = []
    for path, page in pages.items():
        for tag, link in page.links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.scheme or parts.netloc:
                is_dead = tag != "a"
            else:
                ids = pages[target].ids if target in pages else {parts.fragment}
                is_dead = not target.is_file() or (parts.fragment and parts.fragment not in ids)
            dead += [(path.name, link)] * bool(is_dead)
    assert dead == []


def test_code_is_that_of_the_files_to_the_byte(site):
    """Of a script, with an anchor for each detail, and of both sides of a diff."""
    for script in ROWS:
        page = Page(site / f"{script.name}.html")
        assert "".join(page.blocks) == script.source and {*script.details} <= page.ids
        assert (site / f"{script.name}.py").read_bytes() == script.path.read_bytes()
    for child in [script for script in ROWS if script.parent]:
        blocks = Page(site / "diffs" / f"{child.name}.html").blocks
        for i, script in enumerate((SCRIPTS[child.parent], child)):
            assert "".join(blocks[i::2]) == script.source.partition(RULER)[0] + RULER + "\n"


def test_the_data_of_the_curves_are_those_of_the_runs(site):
    data = json.loads((site / "curves" / "mujoco" / "Hopper-v4.json").read_text())
    (run,) = [run for run in data["ours"] if run["label"] == "tuned"]
    paths = [
        ROOT / "benchmark" / "results" / "mujoco" / "Hopper-v4" / f"chosen__{seed}.csv"
        for seed in run["numbers"]
    ]
    ends = np.array([pd.read_csv(path, comment="#")["return"].iloc[-1] for path in paths])
    assert [seed[-1] for seed in run["step"]["seeds"]] == pytest.approx(ends, rel=1e-3)
    assert run["step"]["mean"][-1] == pytest.approx(ends.mean(), rel=1e-3)
    half = 2.262 * ends.std(ddof=1) / 10**0.5  # Student's t of nine degrees of freedom
    assert run["step"]["high"][-1] - run["step"]["mean"][-1] == pytest.approx(half, rel=1e-2)
    assert len(data["lines"]) == 2  # CleanRL's two publications


# -- in a browser --
@pytest.fixture(scope="module")
def address(site):
    handler = partial(SimpleHTTPRequestHandler, directory=site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser(site):
    webdriver = pytest.importorskip("selenium.webdriver", reason="no Selenium here (--group docs)")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no Chromium here")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in "headless=new no-sandbox disable-gpu disable-dev-shm-usage".split():
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    browser.implicitly_wait(10)
    yield browser
    browser.quit()


@pytest.fixture
def look(browser, address):
    """look(page) opens a page at a width; what went wrong until the end of a test fails it."""

    def look(page: str, width: int = 1400):
        size = {"width": width, "height": 840, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(address + page)
        return browser

    yield look
    assert browser.get_log("browser") == []
    events = [json.loads(x["message"])["message"] for x in browser.get_log("performance")]
    asked = [x["params"]["request"]["url"] for x in events if x["method"].endswith("BeSent")]
    assert asked and [x for x in asked if not x.startswith((address, "data:", "blob:"))] == []


def is_in_view(browser, element) -> bool:
    place = "const r = arguments[0].getBoundingClientRect();"
    return browser.execute_script(f"{place} return r.top >= 0 && r.top < innerHeight", element)


def test_on_a_phone_no_page_scrolls_sideways_and_prose_is_above_code(look, site):
    pages = [path for path in site.rglob("*.html") if path.stem not in SCRIPTS]
    for path in [*pages, site / "diffs" / "ppo_atari.html", site / "ppo.html"]:
        browser = look(str(path.relative_to(site)), width=390)
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= 390, path.name
    prose = browser.find_element("link text", "C05 Generalized advantage estimation")
    line = browser.find_element("id", "C05")
    assert prose.location["y"] < line.location["y"]
    assert abs(prose.location["x"] - line.location["x"]) < 60


def test_an_id_leads_to_its_card_and_back(look):
    """Prose stands beside its line, a statement or the comment above; plumbing is folded."""
    browser = look("ppo.html")
    browser.find_element("css selector", "#C05 a").click()
    assert browser.current_url.endswith("core.html#c05-generalized-advantage-estimation")
    heading = browser.find_element("id", "c05-generalized-advantage-estimation")
    assert is_in_view(browser, heading)
    browser.find_element("css selector", "a[href$='ppo.html#C05']").click()
    assert browser.current_url.endswith("/ppo.html#C05")
    line = browser.find_element("id", "C05")
    assert is_in_view(browser, line) and "lastgaelam = delta[t]" in line.text
    prose = browser.find_element("link text", "C05 Generalized advantage estimation")
    assert prose.location["x"] < line.location["x"]
    assert abs(prose.location["y"] - line.location["y"]) < 60
    last = browser.find_elements("css selector", ".annotated .number")[-1]
    assert not last.is_displayed()
    browser.find_element("css selector", ".annotated summary").click()
    assert last.is_displayed()


def test_the_curves_react(look):
    from selenium.webdriver.support.ui import WebDriverWait

    browser = look("curves.html")

    def wait_for(line: str) -> set[str]:
        """All lines that are drawn, once this one is."""
        names = "return document.querySelector('#plot').data?.map(line => line.name) ?? []"
        drawn = WebDriverWait(browser, 20).until(
            lambda _: (found := browser.execute_script(names)) and line in found and found
        )
        return {*drawn}

    assert {"default"} < wait_for("default")
    browser.find_element("css selector", "option[value='mujoco/Hopper-v4']").click()
    assert any("CleanRL" in name for name in wait_for("tuned"))
    browser.find_element("css selector", "[name=show][value=seeds]").click()
    assert "as published" not in wait_for("tuned, seed 203")
    browser.find_element("css selector", "[name=recipe][value='2']").click()
    wait_for("as published")
    assert "millions" in browser.find_element("css selector", ".xtitle").text
    browser.find_element("css selector", "[name=axis][value=seconds]").click()
    assert "minutes" in browser.find_element("css selector", ".xtitle").text
