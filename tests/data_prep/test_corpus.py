"""`alma corpus git`: what is written."""

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from data_prep.corpus import __main__ as cli

from .conftest import outcome, run

PLAIN = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": os.devnull}


@pytest.fixture
def corpus(capfd):
    """Run the command; returns exit code, stdout, stderr."""
    return lambda *words: outcome(lambda: run(cli.main, *words), capfd)


@pytest.fixture
def refused(corpus):
    """Run the command, which must refuse; returns its one line."""

    def call(*words: object) -> str:
        code, out, err = corpus(*words)
        (line,) = err.splitlines()
        assert (code, out) == (2, "")
        return line.removeprefix("error: ")

    return call


def read(path: Path) -> list[dict[str, str]]:
    """The records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


class Repository:
    """A git repository made commit by commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str, data: bytes = b"", **variables: str) -> str:
        """Run git here, without the user's settings; returns its output."""
        done = subprocess.run(
            ["git", *words],
            cwd=self.folder,
            input=data,
            capture_output=True,
            env=os.environ | PLAIN | variables,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode().strip()

    def raw(self, message: bytes, date: str, parent: str = "") -> None:
        """Make a commit that git itself would refuse, or mend; HEAD is then at it."""
        after = f"parent {parent}\n" if parent else ""
        head = (
            f"tree {self.git('mktree')}\n{after}author A <a@x> {date}\n"
            "committer A <a@x> 1500000000 +0000\n\n"
        )
        words = ("hash-object", "--literally", "-t", "commit", "-w", "--stdin")
        self.git("update-ref", "HEAD", self.git(*words, data=head.encode() + message))

    def commit(self, message: str, date: str, author: str = "Ann <ann@x.org>") -> None:
        """Commit nothing with a message; `date`: the author's, the committer's is 2030."""
        name, _, address = author.rstrip(">").partition(" <")
        self.git(
            *(
                "commit",
                "-q",
                "--allow-empty",
                "--allow-empty-message",
                "--cleanup=verbatim",
                "-F",
                "-",
            ),
            data=message.encode(),
            GIT_AUTHOR_NAME=name,
            GIT_AUTHOR_EMAIL=address,
            GIT_AUTHOR_DATE=date,
            GIT_COMMITTER_NAME="Com",
            GIT_COMMITTER_EMAIL="com@x.org",
            GIT_COMMITTER_DATE="2030-01-01T00:00:00+00:00",
        )


@pytest.fixture
def repository(tmp_path) -> Repository:
    """In a folder whose name git could take for an option."""
    return Repository(tmp_path / "a b" / "--upload-pack=touch pwned")


def test_commits_are_messages_with_the_authors_dates(repository, corpus, tmp_path, monkeypatch):
    commit = repository.commit
    commit(
        "First\n\nThe body: of it.\n\nSigned-off-by: Ann <ann@x.org>\nFixes: 1234\n",
        "2019-12-31T23:30:00-02:00",
    )
    commit("Zweite Größe", "2020-06-01T12:00:00+05:30", "Bob <bob@y.org>")
    commit(
        "Third\n\nReviewed-by: Bob <bob@y.org>\n\nText after it, by: hand.\n",
        "2021-01-01T00:00:00+00:00",
    )
    commit("", "2021-01-02T00:00:00+00:00")
    commit("\n\nSigned-off-by: Ann <ann@x.org>\n", "2021-01-02T00:00:00+00:00")
    repository.raw(b"Broken \xff byte", "1640995200 +0000", repository.git("rev-parse", "HEAD"))
    repository.git("checkout", "-q", "-b", "side", "HEAD~2")
    commit("On the side\n\nCo-authored-by: Zoë <zoe@z.org>", "2023-01-01T00:00:00+00:00")
    repository.git("checkout", "-q", "main")
    named = {
        f"GIT_{who}_{field}": "m@x"
        for who in ("AUTHOR", "COMMITTER")
        for field in ("NAME", "EMAIL")
    }
    repository.git("merge", "-q", "-m", "Merge branch side", "side", **named)
    repository.git("config", "log.showSignature", "true")
    repository.git("config", "gpg.program", "/nowhere/gpg")
    repository.git("config", "color.ui", "always")
    other = Repository(tmp_path / "other")
    other.commit("Elsewhere", "2020-01-01T00:00:00+00:00")
    monkeypatch.setenv("GIT_DIR", str(other.folder / ".git"))  # as in a hook
    code, out, err = corpus("git", repository.folder, "--out", tmp_path / "new/commits.jsonl")
    assert (code, err) == (0, "")
    dates = {record["text"]: record["date"] for record in read(tmp_path / "new/commits.jsonl")}
    assert {text: datetime.fromisoformat(date) for text, date in dates.items()} == {
        "First\n\nThe body: of it.": datetime(2020, 1, 1, 1, 30, tzinfo=UTC),
        "Zweite Größe": datetime(2020, 6, 1, 6, 30, tzinfo=UTC),
        "Third\n\n\nText after it, by: hand.": datetime(2021, 1, 1, tzinfo=UTC),
        "Broken \ufffd byte": datetime(2022, 1, 1, tzinfo=UTC),
        "On the side": datetime(2023, 1, 1, tzinfo=UTC),
    }
    assert dates["Zweite Größe"] == "2020-06-01T12:00:00+05:30"
    lines = out.splitlines()
    assert lines[0] == "5 documents, 19 words, 2020-01-01 to 2023-01-01"
    assert lines[1] == "left out: 2 empty messages"
    assert not (tmp_path / "pwned").exists()


def test_a_time_zone_that_does_not_exist_and_a_date_that_does_not(repository, corpus, tmp_path):
    """As broken programs wrote them."""
    out = tmp_path / "out.jsonl"
    repository.raw(b"zone", "1000000000 +51800")
    assert corpus("git", repository.folder, "--out", out)[0] == 0
    assert read(out) == [{"date": "2001-09-09T01:46:40+00:00", "text": "zone"}]
    out.unlink()
    for date in ("99999999999999 +0000", "gone"):
        repository.raw(b"date", date)
        code, _, err = corpus("git", repository.folder, "--out", out)
        assert (code, out.exists()) == (2, False)
        assert "no document to write (left out: 1 with an unreadable date)" in err


def test_the_newest_documents_up_to_some_words(repository, corpus, tmp_path):
    for message in ("One two", "Three four five"):
        repository.commit(message, "2020-01-01T00:00:00+00:00")
    for most, expected in ((5, ["Three four five", "One two"]), (4, ["Three four five"])):
        out = tmp_path / f"{most}.jsonl"
        assert corpus("git", "--out", out, "--max-words", most, "--", repository.folder)[0] == 0
        assert [record["text"] for record in read(out)] == expected


def test_what_git_cannot_read_is_one_line(repository, refused, corpus, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    (tmp_path / "plain").mkdir()
    for words, message in (
        (("git", repository.folder), "a repository without commits"),
        (("git", tmp_path / "plain"), "git failed (not a git repository"),
        (("git", "https://example.org/x.git"), "git clone"),
        (("git",), "give the repository"),
        (("gitt", repository.folder), "did you mean git?"),
        (("pydoc", "stdlibs"), "did you mean stdlib"),
    ):
        assert message in refused(*words, "--out", out)
    assert "name it commits.txt.jsonl" in refused("git", repository.folder, "--out", "commits.txt")
    assert not out.exists()
    for message in ("One", "Two"):
        repository.commit(message, "2020-01-01T00:00:00+00:00")
    out.write_text("{}\n")
    parent = repository.git("rev-parse", "HEAD~")
    (damaged,) = (repository.folder / ".git/objects").glob(f"{parent[:2]}/*")
    damaged.chmod(0o600)
    damaged.write_bytes(b"damaged")
    assert "git failed (" in refused("git", repository.folder, "--out", out)
    assert read(out) == [{}], "untouched"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in refused("git", repository.folder, "--out", out)


def test_the_same_again_leaves_the_file_untouched(repository, corpus, tmp_path):
    repository.commit("One", "2020-01-01T00:00:00+00:00")
    out = tmp_path / "out.jsonl"
    for same in (False, True, False):
        before = out.stat().st_mtime_ns if out.exists() else None
        assert corpus("git", repository.folder, "--out", out)[0] == 0
        assert (out.stat().st_mtime_ns == before) == same
        if same:
            repository.commit("Two", "2020-01-01T00:00:00+00:00")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b", "out.jsonl"]
