"""Streams of `python -m benchmarks retraining`: histories of git, images, series; refusals."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from alma.errors import UserError
from benchmarks.retraining import cifar_stream, streams
from benchmarks.retraining.forecast_stream import matrix_of_mape, matrix_of_regressions
from benchmarks.retraining.image_stream import matrix_of_errors
from benchmarks.retraining.inputs import HOW_TO_CLONE, DatedText, Inputs, read_history
from benchmarks.retraining.main import main
from benchmarks.retraining.text_stream import _errors_by_month, _labelled

GIT_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "PATH": os.environ["PATH"],
}


def commit(repository: Path, date: str, message: str) -> None:
    """Commit nothing, at noon of a day."""
    moment = {"GIT_AUTHOR_DATE": f"{date}T12:00:00", "GIT_COMMITTER_DATE": f"{date}T12:00:00"}
    command = ["git", "-C", str(repository), "commit", "-q", "--allow-empty", "-m", message]
    subprocess.run(command, check=True, env=GIT_ENVIRONMENT | moment)


def test_a_history_is_read_with_dates_and_whole_messages(tmp_path: Path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, env=GIT_ENVIRONMENT)
    commit(tmp_path, "2010-04-02", "ftp: resume\n\nA body.")
    commit(tmp_path, "2010-05-03", "no area")
    assert list(read_history(tmp_path)) == [
        DatedText("2010-05-03", "no area\n"),
        DatedText("2010-04-02", "ftp: resume\n\nA body.\n"),
    ]
    with pytest.raises(UserError, match="without curl's first commit: git clone --bare"):
        Inputs(tmp_path, tmp_path).check()
    with pytest.raises(UserError, match="no such folder"):
        Inputs(tmp_path, tmp_path / "missing").check()
    Inputs(tmp_path).check()


def test_areas_are_before_the_colon_of_the_subject():
    documents = [
        DatedText("2010-03-31", "ftp: too early"),
        DatedText("2010-04-02", "FTP: resume\n\nbody: with a colon"),
        DatedText("2010-04-03", "no area\n\nbody: with a colon"),
    ]
    assert _labelled(documents, "2010-04") == (
        ["2010-04"],
        ["ftp"],
        [" resume\n\nbody: with a colon"],
    )


def test_models_know_the_words_of_their_own_months():
    """Two areas, whose words are swapped in the third month."""
    pytest.importorskip("sklearn")
    documents = []
    for month, words in (("2010-04", "ab"), ("2010-05", "ab"), ("2010-06", "ba")):
        for number in range(100):
            area = "xy"[number % 2]
            word = words[number % 2]
            documents.append(DatedText(f"{month}-01", f"{area}: {word}{word} {word}{word}{word}"))
    names, errors = _errors_by_month(documents, "2010-04")
    assert names == ["2010-04", "2010-05", "2010-06"]
    assert errors[1].tolist() == [0.0, 0.0, 100.0]


def test_without_curl_one_line_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("river")
    pytest.importorskip("sklearn")
    arguments = ["--data", str(tmp_path), "--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match="no stream has its data"):
        main([*arguments, "--streams", "curl-areas"])
    line = f"left out: curl-areas (no history of curl: {HOW_TO_CLONE})\n"
    assert capsys.readouterr().out == line
    with pytest.raises(UserError, match="without curl's first commit"):
        main([*arguments, "--streams", "curl-areas", "--curl", str(tmp_path)])


def test_a_matrix_that_advise_refuses_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("river")
    values = np.full((24, 24), 20.0)
    values[5, 5] = 99.0
    names = [str(number) for number in range(1, 25)]
    streams.write_matrix(tmp_path / "shares.csv", "error (%)", names, values)
    arguments = ["--cache", str(tmp_path), "--out", str(tmp_path / "out"), "--streams", "shares"]
    with pytest.raises(UserError, match="no stream is left"):
        main(arguments)
    assert "left out: shares (alma advise --matrix refuses" in capsys.readouterr().out
    assert not list((tmp_path / "out").iterdir())


def test_the_light_of_images_comes_back_after_a_year():
    images = np.random.default_rng(0).random((5, 3, 32, 32)).astype(np.float32)
    assert np.allclose(cifar_stream._lit(images, 0), images)
    assert np.allclose(cifar_stream._lit(images, 52), images, atol=1e-6)
    dark = cifar_stream._lit(images, 26)
    assert np.allclose(dark[:, 1], 0.35 * images[:, 1])
    assert dark[:, 0].mean() < dark[:, 1].mean() < dark[:, 2].mean()
    assert np.isfinite(cifar_stream._features(dark)).all()
    assert cifar_stream._features(dark).shape == (5, 3 * 8 * 8 + 8 * 4 * 4)


def test_images_are_read_from_the_binary_version(tmp_path: Path):
    records = np.random.default_rng(0).integers(0, 256, (4, 3073), dtype=np.uint8)
    records.tofile(tmp_path / "batch.bin")
    labels, images = cifar_stream._read([tmp_path / "batch.bin"])
    assert labels.tolist() == records[:, 0].tolist()
    assert images[2, 1, 0, 5] == pytest.approx(records[2, 1 + 1024 + 5] / 255)


def test_a_week_is_tested_on_images_that_no_model_has_seen():
    """Classes that are swapped in the tested part alone are all wrong."""
    pytest.importorskip("sklearn")
    classes = np.arange(40) % 2
    pixels = np.column_stack([classes, 1 - classes]).astype(float)
    names, errors = matrix_of_errors([pixels, pixels], [classes, classes], 20)
    assert (names, errors.tolist()) == (["1", "2"], [[0.0, 0.0], [0.0, 0.0]])
    errors = matrix_of_errors([pixels], [np.append(classes[:20], 1 - classes[20:])], 20)[1]
    assert errors.tolist() == [[100.0]]


def test_a_regression_on_other_inputs_is_that_on_lags():
    series = 5 + np.random.default_rng(0).random(120)
    lagged = np.full((120, 2), np.nan)
    lagged[2:, 0] = series[:-2]
    lagged[2:, 1] = series[1:-1]
    expected = matrix_of_mape(series, 10, 40, 2)
    assert matrix_of_regressions(lagged, series, 10, 40) == pytest.approx(expected)
    assert len(expected) == 8


def test_one_command_makes_the_table_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """`python -m benchmarks retraining` on a small matrix; a second start reads its costs."""
    pytest.importorskip("river")
    pytest.importorskip("sklearn")
    at = np.arange(26)
    random = np.random.default_rng(0)
    values = 20 + 0.5 * np.abs(at - at[:, None]) + 0.1 * random.normal(size=(26, 26))
    names = [str(number) for number in range(1, 27)]
    streams.write_matrix(tmp_path / "shares.csv", "MAPE (%)", names, values)
    arguments = ["--cache", str(tmp_path), "--out", str(tmp_path / "out"), "--streams", "shares"]
    main([*arguments, "--starts", "1"])
    text = capsys.readouterr().out
    assert text.count("\n| ALMA plan |") == 1
    assert "* Lowest mean: " in text
    means = (tmp_path / "out" / "table_by_stream.csv").read_text()
    assert 'shares,real,"ALMA plan",1.0' in means
    costs = tmp_path / "out" / "costs-shares-1.csv"
    costs.write_text(costs.read_text().replace("shares,never,0.05,11,", "shares,never,0.05,11,9"))
    main([*arguments, "--starts", "1"])
    assert capsys.readouterr().out != text


def test_streams_have_names_of_their_own():
    assert len({source.make for source in streams.SOURCES.values()}) == len(streams.SOURCES)
    sealed = [name for name, source in streams.SOURCES.items() if source.is_sealed]
    assert sealed == ["git-areas", "beige-book", "co2"]
