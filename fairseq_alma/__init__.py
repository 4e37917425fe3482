"""The fairseq plug-in; importing it registers its task, archs and criterion.

Our commands, such as `alma export`, delay this until they import fairseq: their options are parsed
before fairseq and torch load, which takes seconds.
"""

import sys

import fairseq_alma_hook

# Python sets "-m" while it locates the module of `python -m`, alma.__main__ sets "alma export".
if sys.argv[0] == "-m" or sys.argv[0].startswith("alma "):
    fairseq_alma_hook.install()
else:
    from fairseq_alma import plugin  # noqa: F401
