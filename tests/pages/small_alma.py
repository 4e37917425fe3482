"""`alma` as the blocks of the pages find it: with words added that make the work small.

The added words come last, where they win. `ALMA_ADDS` has a JSON list of [pattern, words]: those of
the first pattern that fits the start of the command line are added.
"""

import json
import os
import re
import sys

line = " ".join(sys.argv[1:])
words = sys.argv[1:]
for pattern, added in json.loads(os.environ["ALMA_ADDS"]):
    if re.match(pattern, line):
        words += added.split()
        break
os.execv(sys.executable, [sys.executable, "-m", "alma", *words])
