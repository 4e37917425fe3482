#!/usr/bin/env bash
# Simple English Wikipedia: download, JSON lines, stream, two learners, report. See README.md in this folder.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
out=${1:-wiki_out}
url=https://huggingface.co/datasets/wikimedia/wikipedia/resolve/main/20231101.simple/train-00000-of-00001.parquet
sha256=31bded16768a47c286becd292079122f5d7d4397a17b87d4250a00ccd581e6f0
mkdir -p "$out"

if [ ! -f "$out/wiki.jsonl" ]; then
	if [ ! -f "$out/wiki.parquet" ]; then
		curl --fail --location --output "$out/part" "$url"
		echo "$sha256  $out/part" | sha256sum --check
		mv "$out/part" "$out/wiki.parquet"
	fi
	python "$here/to_jsonl.py" "$out/wiki.parquet" >"$out/part"
	mv "$out/part" "$out/wiki.jsonl"
fi

alma data "wiki=$out/wiki.jsonl" --out "$out/stream" --mega-batches 4 --words "${WORDS:-300k}" \
	--eval-words "${EVAL_WORDS:-100k}" --valid-words "${VALID_WORDS:-20k}" --vocab-size "${VOCAB_SIZE:-4000}" \
	--max-document-words 1k --seed 1

for learner in sm4 gmoe; do
	alma train "$here/../../experiments/table2.yaml" "runs=${learner}_w1" --stream "$out/stream" \
		--size "${SIZE:-small}" --out "$out/runs/$learner" --seed 1
done
alma report "$out/runs" --out "$out/report"
