"""The report page: its figures and tables, and text that no page expects."""

import base64
import re

from alma.report import compare, page
from alma.report.results import find_runs, find_sections, group

from .synthetic import image_run, make_run, report

EVIL = "</script><b onload=alert(1)>&amp;%{x}"


def test_the_page_has_the_front_and_the_curves_and_no_script(grid):
    written = page.body(find_runs([grid]))
    assert re.findall('<img alt="(.*?)"', written) == [
        "Which model to use?",
        "front",
        "over_time",
    ]
    assert written.index('class="answer"') < written.index('alt="front"')
    picture = base64.b64decode(re.findall('base64,(.*?)"', written)[1])
    assert picture.count(b"average error") == 1
    assert b"<script" not in picture


def test_text_from_records_is_no_markup(tmp_path):
    for seed in (0, 1):
        image_run(tmp_path / str(seed), [0.5, 0.4], learner=EVIL, name="<i>", seed=seed)
    written = page.body(find_runs([tmp_path]), [f"no rows yet: {EVIL}"])
    assert "<b onload" not in written
    assert "<i>" not in written
    assert "</script>" not in written
    pictures = re.findall('base64,(.*?)"', written)
    assert pictures
    assert not any(b"<b onload" in base64.b64decode(picture) for picture in pictures)


def test_runs_with_few_rows_and_unknown_learners(tmp_path):
    make_run(tmp_path / "untrained", [90.0, 20.0], rows=1)
    make_run(tmp_path / "none", [90.0, 20.0], rows=0, learner="ens")
    make_run(tmp_path / "new", [90.0, 20.0], learner="my_learner")
    assert "<td>my_learner</td>" in page.body(find_runs([tmp_path]))
    assert "sm (not finished, t=0/1)" in page.body(find_runs([tmp_path / "untrained"]))


def test_the_command_writes_the_page(tmp_path):
    make_run(tmp_path / "a", [90.0, 20.0])
    make_run(tmp_path / "b", [90.0, 20.0], rows=0, learner="ens")
    out = tmp_path / "new/report.html"
    done = report(tmp_path, "--html", out)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(out))
    assert f"no rows yet: {tmp_path / 'b'}" in out.read_text()


def test_the_page_has_the_tables_of_the_report(grid):
    (section,) = find_sections(find_runs([grid]))
    (results,) = group(find_runs([grid]))
    tables, *_ = page.tables(section, None)
    assert sorted(tables.cells) == sorted(compare.table(results))
