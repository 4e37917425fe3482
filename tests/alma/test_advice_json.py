"""advice.json has the fields that docs/outputs.md lists, and no others."""

import re

from .growing import grown_run
from .synthetic import ROOT, call_advise, image_run


def test_documented_keys_of_advice(tmp_path):
    """Those of a record with an answer, and of one with too few cells."""

    def cell(t, j):
        return 0.9 if not t else 0.2 + 0.05 * abs(j - t) + 0.001 * (t * j % 5)

    records = []
    for is_tested in (True, False):
        place = tmp_path / str(is_tested)
        for seed in (0, 1):
            for learner in ("sm", "ens"):
                run = place / f"{learner}{seed}"
                grown_run(run, image_run, cell, 7, 2, is_tested, seed, learner=learner, members=2)
        done = call_advise(place, "--price", "1/10", "--out", tmp_path / f"advice{is_tested}")
        records.append(done.record)
    answered, starved = records
    objects = [*records, answered["newest"], *answered["newest"]["configurations"]]
    objects += [*answered["decisions"], *answered["configurations"], answered["retraining"]]
    objects += [answered["retraining"]["plan"], starved["no_retraining"]]
    objects += answered["retraining"]["cadences"]
    seen = {key for record in objects for key in record}
    text = (
        (ROOT / "docs/outputs.md").read_text("utf-8").split("## advice.json\n")[1].split("\n## ")[0]
    )
    assert seen == {key for key in seen if f"`{key}`" in text}
    first_cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(first_cells))) <= seen
