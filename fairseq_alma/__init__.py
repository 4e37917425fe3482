"""The fairseq plug-in; importing it registers its task, archs and criterion.

Only `python -m fairseq_alma.COMMAND` delays this until COMMAND imports fairseq: its options are parsed before
fairseq and torch load, which takes seconds.
"""

import sys

import fairseq_alma_hook

if sys.argv[0] == "-m":  # what Python sets while it locates the module of -m
    fairseq_alma_hook.install()
else:
    from fairseq_alma import plugin  # noqa: F401
