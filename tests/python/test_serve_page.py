"""serve's page in a real browser: Debian's chromium, driven by selenium."""

import shutil
import time
import urllib.request

import http_server
import pytest

WAIT = 120

webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("no browser: apt-get install chromium chromium-driver", allow_module_level=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    (root / "key").write_text("s3cret")
    arguments = ("--positions", 200_000, "--api-key-file", root / "key", "--texts", 2)
    with http_server.Server(http_server.make_model(root), *arguments) as started:
        yield started


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1000,800",
        f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    def __init__(self, browser, server):
        self.browser, self.server = browser, server
        browser.get(f"http://127.0.0.1:{server.port}/")
        browser.execute_script("sessionStorage.clear()")
        browser.refresh()
        self.until("the model's name", lambda: self("name").text == "tiny-model")

    def __call__(self, name):
        return self.browser.find_element("id", name)

    def until(self, said, true):
        deadline = time.monotonic() + WAIT
        while not true():
            assert time.monotonic() < deadline, (
                f"{said}: {self.browser.find_element('tag name', 'body').text}"
            )
            time.sleep(0.02)

    def set(self, **settings):
        if not self("settings").get_attribute("open"):
            self.browser.find_element("tag name", "summary").click()
        for name, value in settings.items():
            self(name).clear()
            self(name).send_keys(str(value))

    def messages(self):
        found = self.browser.find_elements("css selector", ".message")
        return [(m.get_attribute("class").split()[1], m.text.split("\n", 1)[-1]) for m in found]

    def errors(self):
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def page(browser, server):
    return Page(browser, server)


def test_a_turn_streams_and_the_next_one_has_it_before_it(page, server):
    page.set(key="s3cret", max_tokens=20, temperature=0, system="be a bird")
    page("text").send_keys("the river\n")  # Enter sends
    page.until("an answer", lambda: "tokens, " in page("state").text)
    (asked, first), (answered, second) = page.messages()
    assert (asked, first, answered) == ("user", "the river", "assistant")
    prompt = [{"role": "system", "content": "be a bird"}, {"role": "user", "content": "the river"}]
    body = {"model": "tiny-model", "messages": prompt, "max_tokens": 20, "temperature": 0}
    _, _, found = server.post("/v1/chat/completions", body, authorization="Bearer s3cret")
    said = found["choices"][0]["message"]["content"]
    words = page.browser.find_elements("css selector", ".message.assistant span")[1]
    assert words.get_attribute("textContent") == said and second is not None
    page("text").send_keys("a stone")
    page("send").click()
    page.until("a second answer", lambda: len(page.messages()) == 4 and "tokens, " in page("state").text)
    prompt += [{"role": "assistant", "content": said}, {"role": "user", "content": "a stone"}]
    _, _, found = server.post(
        "/v1/chat/completions", body | {"messages": prompt}, authorization="Bearer s3cret"
    )
    words = page.browser.find_elements("css selector", ".message.assistant span")[3]
    assert words.get_attribute("textContent") == found["choices"][0]["message"]["content"]
    page("new").click()
    page.until("nothing", lambda: page.messages() == [])
    assert page.errors() == []  # nor has the policy refused anything


@pytest.mark.parametrize("by", ["button", "key"])
def test_stop_frees_the_place_and_keeps_what_was_said(by, page, server):
    page.set(key="s3cret", max_tokens=50_000, temperature=1)
    for seed in range(20):  # until an answer does not end by itself before it is stopped
        page.set(seed=seed)
        page("text").send_keys("the river\n")
        page.until("some of it", lambda: len(page.messages()) % 2 == 0 and len(page.messages()[-1][1]) > 5)
        if by == "button":
            page("send").click()
        else:
            page("text").send_keys("\ue00c")  # Escape
        page.until("its end", lambda: page("send").text == "Send")
        if page("state").text == "Stopped.":
            break
    assert page("state").text == "Stopped." and len(page.messages()[-1][1]) > 5
    page.until("a free place", lambda: server.answers() == 0)


def test_what_goes_wrong_is_said_and_the_message_is_not_lost(page):
    page.set(key="wrong")
    page("text").send_keys("the river\n")
    page.until("an error", lambda: "the API key is wrong" in page("state").text)
    assert page.messages() == [] and page("text").get_attribute("value") == "the river"
    page.set(key="s3cret", max_tokens=4)
    page("send").click()
    page.until("an answer", lambda: "tokens, " in page("state").text)


def test_what_a_model_writes_is_text(page):
    """It is shown by the same function as a message."""
    page.browser.execute_script("show('assistant', '<img src=x onerror=alert(1)><b>bold</b>')")
    assert page.messages()[-1][1] == "<img src=x onerror=alert(1)><b>bold</b>"
    assert page.browser.find_elements("css selector", ".message img, .message b") == []


def test_shift_and_enter_begin_a_line(page):
    page("text").send_keys("one")
    page("text").send_keys("\ue008", "\ue007")
    page("text").send_keys("two")
    assert page("text").get_attribute("value") == "one\ntwo" and page.messages() == []


def test_a_narrow_screen_shows_all(page):
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 640, "deviceScaleFactor": 2, "mobile": True},
    )
    try:
        page.browser.execute_script("show('assistant', 'x'.repeat(500))")
        page.set()
        script = "return [innerWidth, document.documentElement.scrollWidth]"
        assert page.browser.execute_script(script) == [360, 360]
        for name in ("send", "text", "new", "temperature", "key"):
            place = page(name).rect
            assert place["x"] >= 0 and place["x"] + place["width"] <= 360 and place["height"] >= 24, name
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_can_be_reached_by_keys_and_has_a_name(page):
    script = """return [...document.querySelectorAll("button, input, textarea, summary")].filter(
        e => e.tabIndex < 0 || !(e.labels?.length || e.textContent.trim())).map(e => e.outerHTML)"""
    assert page.browser.execute_script(script) == []
    assert page.browser.switch_to.active_element.get_attribute("id") == "text"


def test_the_page_asks_for_nothing_but_itself(page, server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/") as answer:
        policy, text = answer.headers["content-security-policy"], answer.read().decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert "http://" not in text and "https://" not in text
    script = "return performance.getEntriesByType('resource').map(e => new URL(e.name).pathname)"
    assert set(page.browser.execute_script(script)) <= {"/health"}
    page.browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1';document.body.append(s)"
    )
    assert page.browser.execute_script("return window.ran ?? null") is None
