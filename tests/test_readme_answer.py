"""The answer that README.md begins with is the one that its command prints for its file.

`python -m tests.test_readme_answer` writes the answer that is printed now into README.md.
"""

import re
import sys
import tempfile
from pathlib import Path

from tests.alma.synthetic import call_advise

README = Path(__file__).resolve().parent.parent / "README.md"
_BLOCK = "<!-- {name} -->\n```text\n(.*?)```\n"


def block_of(text: str, name: str) -> str:
    """The block below the comment with this name."""
    found = re.search(_BLOCK.format(name=name), text, re.DOTALL)
    assert found, f"README.md has no block {name}"
    return found[1]


def printed_answer(text: str) -> str:
    """What `alma advise` prints for README's file, without the note below the table."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "accuracy.csv"
        table.write_text(block_of(text, "accuracy.csv"))
        printed = call_advise("--matrix", table).stdout
    return printed[: printed.index("\nExtra loss: ") + 1]


def test_the_printed_answer_is_that_of_the_page():
    text = README.read_text("utf-8")
    assert len(block_of(text, "accuracy.csv").splitlines()) == 10
    printed = printed_answer(text)
    remedy = "`python -m tests.test_readme_answer` writes the new answer into README.md"
    assert block_of(text, "answer") == printed, f"{remedy}:\n{printed}"


def test_the_page_is_short_and_begins_with_the_answer():
    text = README.read_text("utf-8")
    words = re.sub("```.*?```", "", text, flags=re.DOTALL).split()
    assert len(words) <= 900
    blocks = re.findall("```(?:bash|text)\n(.*?)```", text, re.DOTALL)[:3]
    assert blocks[0].count("\n") == 2
    assert "pip install" in blocks[0]
    assert blocks[1:] == [block_of(text, "accuracy.csv"), block_of(text, "answer")]
    assert text.index("--higher-is-better") < text.index("\n## What ALMA is")


def main() -> None:
    """Write the printed answer into README.md."""
    text = README.read_text("utf-8")
    printed = printed_answer(text)
    README.write_text(text.replace(block_of(text, "answer"), printed), "utf-8")
    sys.stdout.write(printed)


if __name__ == "__main__":
    main()
