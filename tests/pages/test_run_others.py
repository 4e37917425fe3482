"""The blocks of the pages that take less long are typed, as tests/pages/ways.py says."""

import pytest

from tests.pages.run import OTHERS, type_page


@pytest.mark.thorough
@pytest.mark.parametrize("page", OTHERS)
def test_the_blocks_of_a_page_run(page, tmp_path, request):
    type_page(page, tmp_path, request)
