"""The server's page in headless Chromium, where there is one: it speaks, makes and deletes voices, shows errors."""

import os
import shutil
import time

import pytest

from mlx_cosyh3 import load
from tests.server_tools import recording, serving  # skips where the extra is missing
from tests.small_voice_model import write_voice_model

from mlx_cosyh3.server.app import create_app  # noqa: E402 isort: skip

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")
FLAGS = ["--no-sandbox", "--autoplay-policy=no-user-gesture-required", "--use-fake-ui-for-media-stream",
         "--use-fake-device-for-media-stream"]  # fmt: skip
WAIT = 60  # seconds after which a test gives up


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    small = load(write_voice_model(tmp_path_factory.mktemp("models") / "speech"))
    with serving(create_app({"small": small, "tiny": load("cosyvoice3-tiny")}, token="correct-horse")) as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    preload = os.environ.pop("LD_PRELOAD", None)  # of a BLAS, which the browser cannot bear
    try:
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            yield browser
            browser.close()
    finally:
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload


@pytest.fixture
def page(browser, url):
    """The page, logged in; what its script fails of fails the test, and so does any request to another host."""
    page, failed = browser.new_page(), []
    page.on("pageerror", lambda e: failed.append(str(e)))
    page.on("request", lambda r: r.url.startswith((url, "blob:", "data:")) or failed.append(r.url))
    page.goto(url)
    until(page, "!document.querySelector('#login').hidden")
    page.fill("#token", "correct-horse")
    page.press("#token", "Enter")
    until(page, "document.querySelectorAll('#voice option').length > 0")
    yield page
    page.close()
    assert failed == []


def until(page, condition):
    """Wait for a condition in the page; asked from outside, since the page's policy forbids to run text as a script."""
    end = time.monotonic() + WAIT
    while not page.evaluate(condition):
        assert time.monotonic() < end, (condition, error(page), page.inner_text("#status"))
        page.wait_for_timeout(50)


def error(page):
    return page.inner_text("#error")


PAINTED = """id => {
  const c = document.getElementById(id);
  return c.getContext("2d").getImageData(0, 0, c.width, c.height).data.filter((x, i) => i % 4 < 3 && x).length;
}"""


@pytest.mark.parametrize("model, voices", [("small", ["anna", "bert", "clara"]), ("tiny", ["awb", "rms", "slt"])])
def test_it_speaks(page, model, voices):
    page.select_option("#model", model)
    assert page.inner_text("#voice").split() == voices
    page.select_option("#voice", voices[1])
    page.fill("#text", "Good morning.")
    page.click("#speak")
    until(page, "document.querySelectorAll('#times tr').length > 0 || document.querySelector('#error').textContent")
    assert error(page) == "" and "s of audio" in page.inner_text("#status")
    times = page.inner_text("#times")
    assert all(stage in times for stage in ("llm", "flow", "vocoder", "first audio"))
    assert page.evaluate(PAINTED, "wave") > 100 and page.evaluate(PAINTED, "mel") > 1000
    until(page, "!document.querySelector('#speak').disabled")
    with page.expect_download() as download:
        page.click("#save")
    assert download.value.path().read_bytes()[:4] == b"RIFF"


def test_an_error_is_shown_and_the_next_request_works(page):
    page.fill("#text", "   ")
    page.click("#speak")
    until(page, "document.querySelector('#error').textContent")
    assert "input" in error(page)
    page.fill("#text", "hello")
    page.click("#speak")
    until(page, "document.querySelectorAll('#times tr').length > 0")
    assert error(page) == ""


def test_a_bad_upload_shows_an_error(page):
    page.set_input_files("#file", {"name": "bad.wav", "mimeType": "audio/wav", "buffer": b"this is not audio"})
    page.click("#make")
    until(page, "document.querySelector('#error').textContent")
    assert "not wav" in error(page)
    page.set_input_files("#file", {"name": "short.wav", "mimeType": "audio/wav", "buffer": recording(0.1)})
    page.click("#make")
    until(page, "document.querySelector('#error').textContent.includes('too short')")


def test_a_voice_from_a_file_speaks_and_is_deleted(page):
    page.set_input_files("#file", {"name": "me.flac", "mimeType": "audio/flac", "buffer": recording(2.0, kind="FLAC")})
    page.fill("#name", "<b>me</b>")
    page.fill("#said", "hello")
    page.click("#make")
    until(page, "document.querySelector('#status').textContent.includes('the voice is there')")
    assert page.evaluate("document.querySelector('#voice').selectedOptions[0].text") == "<b>me</b> (made here)"
    page.fill("#text", "hello")
    page.click("#speak")
    until(page, "document.querySelectorAll('#times tr').length > 0 || document.querySelector('#error').textContent")
    assert error(page) == ""
    page.click("#remove")
    until(page, "document.querySelector('#status').textContent == 'deleted'")
    assert "made here" not in page.inner_text("#voice")
    page.click("#remove")
    until(page, "document.querySelector('#error').textContent")
    assert "only voices that were made here" in error(page)


def test_a_voice_from_the_microphone(page):
    page.click("#record")
    until(page, "document.querySelector('#status').textContent.startsWith('recording')")
    page.wait_for_timeout(1500)  # of sound from the browser's own beeper
    page.click("#record")
    until(page, "document.querySelector('#status').textContent == 'recorded'")
    page.click("#make")
    until(page, "document.querySelector('#status').textContent.includes('the voice is there')")
    page.click("#remove")
    until(page, "document.querySelector('#status').textContent == 'deleted'")


def test_the_keyboard_is_enough(page):
    page.select_option("#model", "small")
    page.focus("#text")
    reached = []
    while (at := page.evaluate("document.activeElement.id")) and at not in reached:
        reached.append(at)
        page.keyboard.press("Tab")
    assert " ".join(reached) == "text model voice speed how speak file record said name make remove"
    unnamed = """[...document.querySelectorAll("input, select, textarea, button")].filter(
        e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length"""
    assert page.evaluate(unnamed) == 0
    page.press("#text", "Control+Enter")
    until(page, "document.querySelectorAll('#times tr').length > 0 || document.querySelector('#error').textContent")
    assert error(page) == ""


def test_a_narrow_window(page):
    page.set_viewport_size({"width": 320, "height": 640})
    outside = """[...document.body.querySelectorAll("*")].filter(e =>
        e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.id || e.tagName)"""
    assert page.evaluate(outside) == [] and page.evaluate("document.documentElement.scrollWidth") == 320


def test_a_wrong_token_is_told(browser, url):
    page = browser.new_page()
    page.goto(url)
    page.fill("#token", "not the token")
    page.click("#enter")
    until(page, "document.querySelector('#error').textContent.includes('token')")
    assert page.inner_text("#voice") == ""
    page.close()
