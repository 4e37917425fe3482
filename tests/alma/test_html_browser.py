"""The report page in Debian's Chromium: what it shows, and what its controls change."""

import shutil

import pytest

from alma.report.html.page import write_page
from alma.report.results import find_runs

from .synthetic import drifting, edited, image_run, lm_run

webdriver = pytest.importorskip("selenium.webdriver")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
BINARIES = [shutil.which(name) for name in ("chromium", "chromedriver")]
pytestmark = pytest.mark.skipif(None in BINARIES, reason="needs Debian's chromium and chromium-driver")
LINK = '<a href="https://example.org">2005</a>'
EVIL = "</script><b onload=alert(1)>&amp;%{x}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Image runs that differ in learner, w, size, replay and seed; text that drifts."""
    place = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        image_run(place / f"sm{seed}", [0.5, 0.4, 0.3, 0.2 + seed / 10], seed=seed)
    image_run(place / "ens", [0.4, 0.3, 0.3, 0.25], size=16, learner="ens", members=5)
    image_run(place / "gmoe", [0.4, 0.4, 0.4, 0.15], w=2, learner="gmoe")
    image_run(place / "replay", [0.4, 0.3, 0.2, 0.1], learner="sm", replay=True)
    image_run(place / "evil", [0.6, 0.6, 0.6, 0.6], learner=EVIL)
    run = lm_run(place / "text", [30, 20], learner="gmoe", experts=[2, 3], stream="text")
    drifting(run, lambda t, j: 10 * t + j if t else 5e4)
    edited(run, lambda row: row["extra"].update(matrix_periods=["1", LINK]))
    return place


@pytest.fixture(scope="module")
def browser(runs, tmp_path_factory):
    """The page in a window that has all figures."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(find_runs([runs]), path, [f"no rows yet: {EVIL}"])
    options = webdriver.ChromeOptions()
    options.binary_location, driver = BINARIES
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,6000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chromium.get(path.as_uri())
        missing = "return document.querySelectorAll('.plot:not(.js-plotly-plot)').length"
        WebDriverWait(chromium, 60).until(lambda _: chromium.execute_script(missing) == 0)
        yield chromium
    finally:
        chromium.quit()


def texts(browser, selector):
    """The texts of the elements that match."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
    )


def traces(browser, number):
    """Name, x, y and visibility of the traces of a figure."""
    code = """return document.querySelectorAll('.plot')[arguments[0]]._fullData
        .map(e => [e.name, e.x, e.y, e.visible])"""
    return browser.execute_script(code, number)


def test_no_errors_and_no_markup_from_records(browser):
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    assert browser.execute_script("return document.querySelectorAll('[onload], main b, .plot a').length") == 0
    assert f"no rows yet: {EVIL}" in texts(browser, "main > ul li")
    assert any(text.startswith(EVIL) for text in texts(browser, ".legendtext"))


def test_hover_tells_the_numbers(browser):
    number = next(i for i, (name, *_) in enumerate(traces(browser, 0)) if name.startswith("gmoe"))
    code = "Plotly.Fx.hover(document.querySelector('.plot'), [{curveNumber: arguments[0], pointNumber: 0}])"
    browser.execute_script(code, number)
    lines = "return [...document.querySelectorAll('.hoverlayer tspan')].map(e => e.textContent).join(' ')"
    shown = WebDriverWait(browser, 5).until(lambda _: browser.execute_script(lines))
    assert "learner gmoe, waiting time 2, size 8, replay no seed 0" in shown
    # Untrained (90%) at t = 1, then 40 at t = 2 and 3, then 15.
    assert "average error (%): 46.25" in shown


def test_a_menu_chooses_the_measure(browser):
    choose = """const plot = document.querySelector('.plot'), { buttons } = plot.layout.updatemenus[0];
        return Plotly.update(plot, ...buttons.find(e => e.label.startsWith(arguments[0])).args) && null;"""
    browser.execute_script(choose, "CER / memory")  # as a click on the entry does
    title = "return document.querySelector('.plot').layout.yaxis.title.text"
    assert browser.execute_script(title) == "CER"
    (point,) = ((x[0], y[0]) for name, x, y, _ in traces(browser, 0) if name.startswith("ens"))
    assert point == pytest.approx((160 * 5, 1.25))
    browser.execute_script(choose, "average error")


def test_streams_that_drift_have_pictures(browser):
    sizes = browser.execute_script("return [...document.images].map(e => e.naturalWidth)")
    assert len(sizes) == 2  # matrix, staleness
    assert all(size > 200 for size in sizes)
