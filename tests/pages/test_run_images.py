"""The blocks of the pages of images are typed, as tests/pages/ways.py says."""

import pytest

from tests.pages.run import IMAGES, type_page


@pytest.mark.thorough
@pytest.mark.parametrize("page", IMAGES)
def test_the_blocks_of_a_page_run(page, tmp_path, request):
    type_page(page, tmp_path, request)
