#!/bin/sh
# The stream of experiments/table2/sizes/tiny.yaml, without a download: documentation that is installed with Python
# and its packages. 4 mega-batches and an evaluation mega-batch; about 20 s, 20 MB.
#   sh experiments/streams/small.sh [STREAM]
set -e
stream=${1:-stream_tiny}
corpus=$stream.corpus
python -m data_prep.pydoc_corpus "$corpus"
python -m data_prep "topics=$corpus/topics.txt" "stdlib=$corpus/stdlib.txt" "packages=$corpus/packages.txt" \
	--out "$stream" --mega-batches 4 --words 100k --eval-words 10k --valid-words 10k --vocab-size 4000 \
	--max-document-words 1k --seed 1
