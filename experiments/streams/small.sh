#!/bin/sh
# The stream of size tiny of experiments/table2.yaml, without a download: documentation that is installed with Python
# and its packages. 4 mega-batches and an evaluation mega-batch; half a minute of one core, 16 MB.
#   sh experiments/streams/small.sh [STREAM]
set -e
stream=${1:-stream_tiny}
corpus=$stream.corpus
for part in topics stdlib packages; do
	python -m data_prep.corpus pydoc $part --out "$corpus/$part.jsonl"
done
python -m data_prep "$corpus/topics.jsonl" "$corpus/stdlib.jsonl" "$corpus/packages.jsonl" \
	--out "$stream" --mega-batches 4 --words 100k --eval-words 10k --valid-words 10k --vocab-size 4000 \
	--max-document-words 1k --seed 1
