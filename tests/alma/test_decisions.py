"""`alma due` and `alma gate` as programs: exit codes, time, packages, and the JSON of the docs."""

import json
import os
import re
import resource
import subprocess
import sys

import pytest

from alma.decisions import due, gate

from .monthly import Monthly
from .synthetic import ROOT, run_here

SECONDS = 2.0
PAGE = ROOT / "docs/decisions.md"
KINDS = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "list": list,
    "null": type(None),
}
"""Types in the tables of docs/decisions.md."""
PROGRAM = """\
import sys
from alma.__main__ import main
sys.argv[0] = "alma"
try:
    main()
finally:
    heavy = {"torch", "fairseq", "matplotlib", "pandas"} & set(sys.modules)
    print(*heavy, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def year(tmp_path_factory):
    """A year of 60 documents a month, and a thirteenth month on which the models were tested."""
    run = Monthly(tmp_path_factory.mktemp("year"), items=60).months(12)
    run.arrive()
    return run


def call(*words):
    """Run `alma WORDS`: the process, its seconds of CPU, and the heavy packages it loaded."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    *errors, heavy = done.stderr.splitlines()
    return done.returncode, done.stdout, errors, seconds, heavy


def test_exit_codes_and_time_of_the_programs(year, tmp_path):
    """Two of them are over in two seconds of a core, on a record of twelve models."""
    codes = {
        ("due", year.directory, "--price", "0.01"): 0,
        ("due", year.directory, "--every", "2"): 1,
        ("gate", year.directory, "--worth", "3%", "--forget", "5%"): 3,
        ("gate", tmp_path): 2,
    }
    for words, expected in codes.items():
        code, out, errors, seconds, heavy = call(*words)
        assert (code, heavy) == (expected, ""), (words, out, errors)
        assert seconds < SECONDS
        assert len(out.splitlines() + errors) == 1
        assert bool(errors) == (expected == 2)


def tables():
    """The fields of each table of the page: {title: {name: kinds}}."""
    fields = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            title = line.strip("# ")
        match = re.match(r"\| `(\w+)` \| ([\w ]+) \|", line)
        if match:
            kinds = tuple(KINDS[word] for word in re.split(r" or | of \w+", match[2]) if word)
            fields.setdefault(title, {})[match[1]] = kinds
    return fields


def flat(kinds):
    """Types as isinstance takes them."""
    types = []
    for kind in kinds:
        types += kind if isinstance(kind, tuple) else [kind]
    return tuple(types)


def check(record, title):
    """An object has the fields of its table, of their kinds."""
    fields = tables()[title]
    assert list(record) == list(fields), title
    for name, value in record.items():
        assert isinstance(value, flat(fields[name])), (title, name, value)
        assert not isinstance(value, bool) or bool in fields[name]


ANSWERS = [
    (due.main, ["--every", "1", "--price", "0.1"]),
    (due.main, ["--every", "3", "--price", "0.1"]),
    (due.main, []),
    (gate.main, ["--forget", "1%"]),
    (gate.main, ["--worth", "1%"]),
]


@pytest.mark.parametrize(("main", "options"), ANSWERS)
def test_the_json_has_the_fields_of_the_page(year, main, options):
    done = run_here(main, [year.directory, *options, "--json"])
    answer = json.loads(done.stdout)
    common = {name: answer.pop(name) for name in tables()["Both"]}
    check(common, "Both")
    assert common["exit_code"] == done.returncode
    assert common["run"] == str(year.directory)
    title = f"alma {common['question']}"
    check(answer, title)
    for name in ("model", "newest", "deployed"):
        if answer.get(name):
            check(answer[name], "A model")
    if title == "alma gate":
        check(answer["newest_part"], "A gain")
        for gain in filter(None, (answer["newest_part"], answer["past"])):
            check(gain["gain"], "An interval")
        return
    for rule in answer["rules"]:
        check(rule, "A rule")
    if answer["plan"]:
        check(answer["plan"], "A plan")
        for saving in answer["plan"]["savings"].values():
            check(saving, "An interval")


def test_the_page_has_the_example_that_a_record_gives(year):
    """The words of the page are those of the commands."""
    text = PAGE.read_text()
    lines = [
        run_here(due.main, [year.directory, "--every", "3"]).stdout,
        run_here(gate.main, [year.directory]).stdout,
    ]
    for line in lines:
        words = re.split(r"[\d.%\-]+", line.strip())
        pattern = r"[\d.%\-]+".join(map(re.escape, words))
        assert re.search(pattern, text), line
