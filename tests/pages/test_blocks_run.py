"""Each block of commands of the pages is typed, as tests/pages/ways.py says."""

import pytest

from tests.pages.blocks import BLOCKS, Block
from tests.pages.run import Reader
from tests.pages.ways import WAYS, Run, Way

pytestmark = pytest.mark.thorough


def ways_of(page: str) -> list[tuple[Block, Way]]:
    """The blocks of a page with their ways, which tests/pages/test_blocks.py compares."""
    blocks = [block for block in BLOCKS if block.page == page]
    return list(zip(blocks, WAYS[page].values(), strict=True))


PAGES = []
for name, ways in WAYS.items():
    if any(isinstance(way, Run) for way in ways.values()):
        PAGES.append(name)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, tmp_path, request):
    reader = Reader(tmp_path, request)
    failures = []
    for block, way in ways_of(page):
        if isinstance(way, Run):
            try:
                reader.type(block, way)
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, "\n\n".join(failures)
    if reader.left_out:
        pytest.skip(f"no SLURM is installed: {', '.join(map(str, reader.left_out))} did not run")
