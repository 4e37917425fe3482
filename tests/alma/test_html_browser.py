"""The report page in Debian's Chromium: what it shows, and what its controls change."""

import math
import shutil

import pytest

from alma.report import compare
from alma.report.html.page import write_page
from alma.report.results import find_runs, group

from .synthetic import drifting, edited, image_run, lm_run, with_expert_layers

pytest.importorskip("plotly")
webdriver = pytest.importorskip("selenium.webdriver")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
BINARIES = [shutil.which(name) for name in ("chromium", "chromedriver")]
pytestmark = pytest.mark.skipif(None in BINARIES, reason="needs Debian's chromium and chromium-driver")
LINK = '<a href="https://example.org">2005</a>'
EVIL = "</script><b onload=alert(1)>&amp;%{x}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Image runs that differ in each facet and in seeds; a language model with experts."""
    place = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        image_run(place / f"sm{seed}", [0.5, 0.4, 0.3, 0.2 + seed / 10], seed=seed)
    image_run(place / "ens", [0.4, 0.3, 0.3, 0.25], size=16, learner="ens", members=5)
    image_run(place / "gmoe", [0.4, 0.4, 0.4, 0.15], w=2, learner="gmoe")
    image_run(place / "replay", [0.4, 0.3, 0.2, 0.1], learner="sm", replay=True)
    image_run(place / "evil", [0.6, 0.6, 0.6, 0.6], learner=EVIL)
    run = lm_run(place / "text", [30, 20], learner="gmoe", experts=[2, 3], stream="text")
    drifting(with_expert_layers(run), lambda t, j: 10 * t + j if t else 5e4)
    edited(run, lambda row: row["extra"].update(matrix_periods=["1", LINK]))
    return place


@pytest.fixture(scope="module")
def browser(runs, tmp_path_factory):
    """The page in a window of 1280 x 900."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(find_runs([runs]), path, [f"no rows yet: {EVIL}"])
    options = webdriver.ChromeOptions()
    options.binary_location, driver = BINARIES
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chromium.get(path.as_uri())
        chromium.execute_script("drawFigures(true)")
        yield chromium
    finally:
        chromium.quit()


def texts(browser, selector):
    """The texts of the visible elements that match."""
    found = "[...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent)"
    return browser.execute_script(f"return {found}.map(e => e.textContent)", selector)


def click(browser, selector):
    """Scroll an element into view and click it."""
    element = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def figure(browser, section, number, name):
    """A trace of a figure by name: its x, y and texts; None without one."""
    code = """const found = document.querySelectorAll(`#section${arguments[0]} .plot`)[arguments[1]].data
        .find((trace) => trace.name === arguments[2]);
        return found ? {x: found.x, y: found.y, text: found.hovertext} : null;"""
    return browser.execute_script(code, section, number, name)


def test_no_errors_and_no_markup_from_records(browser):
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    assert browser.execute_script("return document.querySelectorAll('[onload], main b').length") == 0
    assert browser.execute_script("return document.querySelectorAll('.plot a').length") == 0
    assert texts(browser, ".remarks li") == [f"no rows yet: {EVIL}"]
    assert EVIL in texts(browser, "#section0 .chip span")


def test_numbers_are_those_of_the_report(browser, runs):
    results = group(find_runs([runs]))[0]
    header, *rows = compare.table(results)
    shown = browser.execute_script(
        "return [...document.querySelectorAll('#section0 .scroll')[0].querySelectorAll('tbody tr')]"
        ".map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert sorted(shown) == sorted(rows)
    assert texts(browser, "#section0 .scroll:first-of-type thead button")[: len(header)] == header
    front = figure(browser, 0, 0, "configurations")
    averages = [100 * r.over_seeds(compare.AVERAGES["average"])[0] for r in results]
    assert sorted(front["y"]) == pytest.approx(sorted(averages), rel=1e-5)


def test_a_filter_acts_on_front_curves_and_table(browser):
    rows = "#section0 article:nth-of-type(3) tbody th"
    before = figure(browser, 0, 0, "configurations"), texts(browser, rows)
    assert "<b>ens " in " ".join(before[0]["text"])
    assert curve_named(browser, "ens")
    click(browser, "#section0 input[value=ens]")
    after = figure(browser, 0, 0, "configurations"), texts(browser, rows)
    assert len(after[0]["x"]) == len(before[0]["x"]) - 1
    assert len(after[1]) == len(before[1]) - 1
    assert not curve_named(browser, "ens")
    assert texts(browser, "#section0 .shown") == ["4 of 5 configurations shown"]
    click(browser, "#section0 .filters button")
    assert figure(browser, 0, 0, "configurations") == before[0]


def curve_named(browser, learner):
    """Whether the curves of the first section have one of this learner."""
    code = "return document.querySelectorAll('#section0 .plot')[1].data.map((trace) => trace.name)"
    return any(name.split()[0] == learner for name in browser.execute_script(code))


def test_a_click_or_a_key_sorts_the_table(browser):
    table = "#section0 article:nth-of-type(3)"
    headers = texts(browser, f"{table} thead button")
    place = headers.index("average") + 1

    def column():
        return [float(text.split()[0]) for text in texts(browser, f"{table} tbody tr > :nth-child({place})")]

    click(browser, f"{table} th:nth-child({place}) button")
    assert column() == sorted(column())
    browser.switch_to.active_element.send_keys("\ue007")  # Enter
    assert column() == sorted(column(), reverse=True)
    states = "return [...document.querySelectorAll(arguments[0])].map(e => e.getAttribute('aria-sort'))"
    found = browser.execute_script(states, f"{table} thead th")
    assert found == ["none"] * (place - 1) + ["descending"] + ["none"] * (len(headers) - place)


def test_hover_tells_the_numbers(browser):
    plot = browser.find_element("css selector", "#section0 .plot")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    front = figure(browser, 0, 0, "configurations")
    place = next(i for i, text in enumerate(front["text"]) if "<b>gmoe" in text)
    points = plot.find_elements("css selector", ".trace:last-of-type path.point")
    webdriver.ActionChains(browser).move_to_element(points[place]).perform()
    told = WebDriverWait(browser, 5).until(lambda _: texts_of_hover(browser))
    assert "learner gmoe, waiting time 2, size 8, replay no" in told
    assert "seed 0" in told
    # Untrained (90%) at t = 1, then 40 at t = 2 and 3, then 15.
    assert "average error (%): 46.25" in told


def texts_of_hover(browser):
    """The text of the label at the pointer, its lines joined by spaces."""
    code = "return [...document.querySelectorAll('.hoverlayer tspan')].map(e => e.textContent).join(' ')"
    return browser.execute_script(code)


def test_an_axis_turns_logarithmic(browser):
    axis = "return document.querySelectorAll('#section0 .plot')[1].layout.yaxis.type"
    assert browser.execute_script(axis) == "linear"
    click(browser, "#section0 article:nth-of-type(2) .chip")
    assert browser.execute_script(axis) == "log"
    click(browser, "#section0 article:nth-of-type(2) .chip")


def test_curves_split_into_small_multiples(browser):
    select = browser.find_elements("css selector", "#section0 article:nth-of-type(2) select")[1]
    webdriver.support.select.Select(select).select_by_visible_text("by learner")
    names = "return document.querySelectorAll('#section0 .plot')[1].layout.annotations.map(e => e.text)"
    shown = browser.execute_script(names)
    assert shown[:3] == ["<b>sm</b>", "<b>ens</b>", "<b>gmoe</b>"]
    assert len(shown) == 4
    webdriver.support.select.Select(select).select_by_visible_text("one for all")


def test_no_button_sends_the_data_away(browser):
    titles = "return [...document.querySelectorAll('.modebar-btn')].map(e => e.dataset.title)"
    assert set(browser.execute_script(titles)) == {"Download plot as a PNG", "Zoom", "Pan", "Reset axes"}


def test_each_figure_has_its_data_as_a_table(browser):
    click(browser, "#section0 article:nth-of-type(2) details summary")
    cells = texts(browser, "#section0 article:nth-of-type(2) tbody tr:first-child > *")
    WebDriverWait(browser, 5).until(lambda _: texts(browser, "#section0 article:nth-of-type(2) tbody th"))
    rows = texts(browser, "#section0 article:nth-of-type(2) tbody tr")
    assert any("gmoe" in row and "15.00" in row for row in rows), (cells, rows)
    labels = "return [...document.querySelectorAll('.plot')].every(e => e.getAttribute('aria-label'))"
    assert browser.execute_script(labels)


def test_experts_of_language_models(browser):
    code = "return document.querySelectorAll('#section1 .maps .plot')[1].data[0].z"
    third = pytest.approx(33.3333)
    assert browser.execute_script(code) == [[50, 50, third], [50, 50, third], [None, None, third]]


def test_dark_and_light(browser):
    colour = "return getComputedStyle(document.body).backgroundColor"
    paper = "return document.querySelector('#section0 .plot').layout.paper_bgcolor"
    light = browser.execute_script(colour), browser.execute_script(paper)
    click(browser, "#theme")
    dark = browser.execute_script(colour), browser.execute_script(paper)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert browser.find_element("css selector", "#theme").get_attribute("aria-pressed") == "true"
    click(browser, "#theme")


def test_a_phone_needs_no_horizontal_scrolling(browser):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        WebDriverWait(browser, 5).until(lambda _: browser.execute_script("return innerWidth") == 360)
        wide = "return [document.documentElement.scrollWidth, innerWidth]"
        assert browser.execute_script(wide) == [360, 360]
        browser.execute_script("updates.forEach((update) => update())")
        code = """return document.querySelectorAll("#section0 .plot")[0].data
            .find((trace) => trace.name === "configurations").text.filter((text) => text)"""
        labels = browser.execute_script(code)
        assert labels
        assert all(len(label) <= 14 for label in labels)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_matrix_has_a_framed_diagonal_and_one_scale(browser):
    code = """const plot = [...document.querySelectorAll("article")]
        .find((each) => each.querySelector("h3").textContent === "Evaluation matrix").querySelector(".plot");
        const [trace] = plot.data, frames = plot.layout.shapes.map((each) => each.x0);
        return [trace.z, trace.zmin, trace.zmax, trace.hovertext[1][0], frames];"""
    cells, low, high, hover, frames = browser.execute_script(code)
    assert (cells, low, high, frames) == ([[11, 12], [21, 22]], 11, 22, [-0.5, 0.5])
    assert "j = 1, after mega-batch 2<br>test perplexity: 21.00" in hover


def test_age_has_points_over_a_linear_axis_whatever_is_shown(browser):
    code = """const panel = [...document.querySelectorAll("#section1 article")]
        .find((each) => each.querySelector("h3").textContent === "Age"), plot = panel.querySelector(".plot");
        const select = panel.querySelector("select"), found = [];
        for (const i of [0, 1]) {
            select.value = i;
            select.dispatchEvent(new Event("change"));
            const { xaxis, yaxis } = plot.layout, [trace] = plot.data;
            found.push([trace.x, trace.y, trace.line.shape, yaxis.type, xaxis.zeroline, yaxis.zeroline]);
        }
        const labels = [...panel.querySelectorAll(".chip span")].map((each) => each.textContent);
        const table = panel.querySelector("details");
        table.open = true;
        return [found, labels, plot.data[0].hovertext[2]];"""
    found, chips, hover = browser.execute_script(code)
    # Perplexities [[11, 12], [21, 22]]: the model of t = 1 is the best on both parts.
    rise, old = math.log(21 / 11), math.log(12 / 22)
    assert found[0] == [[-1, 0, 1], pytest.approx([rise, 0, old], rel=1e-5), None, "linear", True, True]
    assert found[1][:2] == [[-1, 0, 1], pytest.approx([rise, -old / 2, 0], rel=1e-5)]
    assert found[1][3] == "linear"
    assert chips == []  # one seed, no logarithm, no untrained model
    assert "age 1<br>regret (nats a token): 0.00" in hover
    article = "#section1 article:has(details[open])"
    WebDriverWait(browser, 5).until(lambda _: texts(browser, f"{article} tbody th"))
    assert "age=-1" in texts(browser, f"{article} thead button")
    browser.execute_script("document.querySelector(arguments[0]).open = false", f"{article} details")


FIT = """const [width] = arguments, problems = [];
    const inside = (one, other) => one.left >= other.left - 1 && one.right <= other.right + 1
        && one.top >= other.top - 1 && one.bottom <= other.bottom + 1;
    for (const plot of document.querySelectorAll(".plot")) {
        const box = plot.getBoundingClientRect();
        if (box.right > width + 1) problems.push(["a figure is wider than the sheet", box.right]);
        for (const part of plot.querySelectorAll(".main-svg, .point, .gtitle, .annotation-text, .xtitle"))
            if (!inside(part.getBoundingClientRect(), box))
                problems.push(["cropped", part.getAttribute("class")]);
    }
    for (const table of document.querySelectorAll(".panel > .scroll > table"))
        if (table.getBoundingClientRect().right > width + 1)
            problems.push(["a table is wider than the sheet"]);
    return problems;"""


@pytest.mark.parametrize("width", [800, 1400])
def test_a_sheet_has_whole_figures(browser, width):
    """Whatever the window: what is drawn lies in its figure, and figures fit a sheet of 19 cm."""
    sheet = round(19 / 2.54 * 96)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        WebDriverWait(browser, 5).until(lambda _: browser.execute_script("return innerWidth") == width)
        browser.execute_script("drawFigures(true)")
        # As Chromium prints: the event, then at once the style and the width of the sheet.
        browser.execute_script("dispatchEvent(new Event('beforeprint'))")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"width": sheet})
        assert browser.execute_script(FIT, sheet) == []
    finally:
        browser.execute_script("dispatchEvent(new Event('afterprint'))")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    # And again on the screen, once Plotly has noticed the size.
    tables = [["a table is wider than the sheet"]]  # they scroll there
    WebDriverWait(browser, 10).until(
        lambda _: [each for each in browser.execute_script(FIT, 1280) if each not in tables] == []
    )
