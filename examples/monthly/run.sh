#!/bin/sh
# Months in a row, as cron would start them: each adds its data and calls month.sh.
#
#   run.sh images FOLDER                    scikit-learn's digits: two weeks, then six more, a week in place of a month
#   run.sh text FOLDER CRAWL DATE DATE...   JSON lines with `date` and `text`, see docs/data.md: text until the first
#                                           DATE, then until each further one
#
# FOLDER gets the data, run/ and models/. The same command resumes what was killed. BY (default: month), WORDS, HELD_OUT
# and VOCAB_SIZE are settings of `alma data`, UPDATES and EPOCHS those of a month's training.
set -eu
here=$(dirname "$(realpath "$0")")

month() {
	printf '\n== %s ==\n' "$1"
	shift
	sh "$here/month.sh" "$folder/run" "$folder/models" "$@"
}

images() {
	first=1
	for week in 2 3 4 5 6 7 8; do
		grep -qs "W0$week" "$folder/shop/manifest.csv" ||
			python3 "$here/../weekly_digits.py" "$folder/shop" --weeks "$first-$week" --test-every 3
		first=$((week + 1))
		month "week $week" alma images --manifest "$folder/shop/manifest.csv" --by week --append --arch mlp --hidden 32 \
			--optimizer adadelta --batch-size 16 --epochs "${EPOCHS:-20}" --no-augment --replay-share .5 \
			--device cpu --out "$folder/run"
	done
}

text() {
	crawl=$1
	shift
	for date; do
		if grep -qsx "$date" "$folder/dates"; then
			: # added before this start
		elif [ -f "$folder/stream/stream.json" ]; then
			alma data "text=$crawl" --append --until "$date" --out "$folder/stream"
		else
			alma data "text=$crawl" --by "${BY:-month}" --until "$date" --words "${WORDS:-300k}" \
				--eval-words "${HELD_OUT:-8k}" --valid-words "${HELD_OUT:-8k}" --vocab-size "${VOCAB_SIZE:-1000}" \
				--near-duplicates drop --seed 1 --out "$folder/stream"
		fi
		grep -qsx "$date" "$folder/dates" || echo "$date" >>"$folder/dates"
		month "$date" alma train "$here/text.yaml" --stream "$folder/stream" "max-update=${UPDATES:-500}" \
			--out "$folder/run"
	done
}

usage() {
	sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
	exit 2
}

kind=${1:-}
folder=${2:-}
case $kind in
images) [ $# = 2 ] || usage ;;
text) [ $# -ge 4 ] || usage ;;
*) usage ;;
esac
mkdir -p "$folder"
shift 2
"$kind" "$@"
