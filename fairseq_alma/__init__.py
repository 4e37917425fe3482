"""The fairseq plug-in: importing it registers its task, its archs and its criterion.

`python -m fairseq_alma.COMMAND` imports it before COMMAND has read its command line: fairseq and torch, which
take seconds, are left to the command then, and the plug-in registers when fairseq is imported.
"""

import sys

import fairseq_alma_hook

if sys.argv[0] == "-m":  # Python's documented mark of this case
    fairseq_alma_hook.install()
else:
    from fairseq_alma import plugin  # noqa: F401
