"""The blocks of the pages of text are typed, as tests/pages/ways.py says."""

import pytest

from tests.pages.run import TEXT, type_page


@pytest.mark.thorough
@pytest.mark.parametrize("page", TEXT)
def test_the_blocks_of_a_page_run(page, tmp_path, request):
    type_page(page, tmp_path, request)
