"""Flag values from fairseq itself; the stand-in of other tests gives the same."""

import shlex

import pytest
from launcher import fake_check

from slurm.lm.request import resolve

LINES = [
    "S --task alma_lm",
    "S --task alma_lm --arch switch_gmoe_tiny --max-sentences 4 --update-freq 2 --max-update 9 "
    "--lr=2e-3",
    "S --task alma_lm --arch switch_gmoe_base --decoder-embed-dim 64 --max-tokens 999 "
    "--moe-expert-count 8",
    "S --task alma_lm --arch transformer_lm --share-decoder-input-output-embed "
    "--attention-dropout 0.1",
    "S --task alma_lm --criterion chunked_cross_entropy --batch-size 2 --sample-break-mode none",
]


@pytest.fixture(scope="module")
def real() -> list:
    return resolve([shlex.split(line) for line in (*LINES, LINES[0])])


def test_the_stand_in_answers_like_fairseq(real):
    fake = fake_check()
    unused = {
        "--adam-eps",
        "--clip-norm",
        "--weight-decay",
        "--total-num-update",
        "--warmup-updates",
    }
    for line, expected in zip(LINES, real, strict=False):
        actual = fake.resolve(shlex.split(line))["settings"]
        assert {name: expected.get(name) for name in actual.keys() - unused} == {
            name: actual[name] for name in actual.keys() - unused
        }, line
    assert real[-1] == real[0]  # equal command lines
