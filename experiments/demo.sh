#!/bin/sh
# All of ALMA on small data, without a download: text becomes a stream, three language models train on it, image
# learners train on digits, and a report compares the runs. About 2 minutes on two idle cores; rerun it to resume.
# usage: demo.sh [FOLDER]
set -eu
out=${1:-demo_out}
model="--arch switch_gmoe_tiny --tokens-per-sample 128 --max-tokens 1024 --max-update 40 --optimizer adam"
model="$model --lr 4e-3 --warmup-updates 10 --clip-norm 1 --no-epoch-checkpoints --cpu"
decay="--lr-scheduler polynomial_decay --total-num-update 40"

run() {
	printf '\n$ %s\n' "$*"
	"$@"
}

all() { # wait for every job; end with the code of one that failed
	code=0
	for job; do wait "$job" || code=$?; done
	[ $code = 0 ] || exit $code
}

run alma corpus pydoc --out "$out/corpus/pydoc.jsonl"
run alma data "$out/corpus/pydoc.jsonl" --out "$out/stream" --mega-batches 4 --words 100k --eval-words 10k \
	--valid-words 10k --vocab-size 4000 --seed 1 --max-document-words 1k

# three at a time: idle OpenMP threads spin, so that processes with all cores each would slow each other down
cores=$(nproc)
export OMP_NUM_THREADS=$((cores > 3 ? cores / 3 : 1))

# shellcheck disable=SC2086  # the flags are words
run alma train "$out/stream" --learner sm --cluster local --out "$out/runs/sm" -- $model $decay & first=$!
run alma train "$out/stream" --learner gmoe --cluster local --out "$out/runs/gmoe" --grow-experts 2,2,4 \
	-- $model $decay & second=$!
run alma train "$out/stream" --learner sm --preset anytime --cluster local --out "$out/runs/anytime" -- $model & third=$!
all $first $second $third

run alma images --learner sm,ens,gens,gmoe --waiting-time 1,4 --out "$out/runs/digits" & first=$!
run alma images --preset anytime --learner sm,ens --out "$out/runs/digits_anytime" & second=$!
run alma images --scenario classes --replay-share 0,0.5 --learner sm,ens --hidden 32 --out "$out/runs/drift" & third=$!
all $first $second $third

run alma report "$out/runs" --out "$out/report"
printf '\ndone: %s\n' "$out/report/report.md"
