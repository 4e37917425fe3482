"""Text that every machine has, as JSON lines for `alma data`: `alma corpus RECIPE`."""

from data_prep.corpus import debian_changelogs, git, pydoc

RECIPES = {
    "git": (git.documents, None),
    "debian-changelogs": (debian_changelogs.documents, debian_changelogs.FOLDER),
    "pydoc": (pydoc.documents, ""),
}
"""By name: what yields each document, given SOURCE and the counts of what is left out; and the default of
SOURCE, None if it must be given."""
