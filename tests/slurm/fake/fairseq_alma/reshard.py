"""Stands for cutting an ordinary data directory: always 3 mega-batches."""

import json
import sys

if sys.argv[1] == "missing":
    print("error: missing: no such directory", file=sys.stderr)
    sys.exit(2)
note = "few words" if "--gpt2-encoder-json" in sys.argv else ""
counts = {"megabatches": 3, "items": [1, 1, 1], "tokens": [90, 90, 90]}
print(json.dumps({**counts, "note": note}))
