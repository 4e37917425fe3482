#!/bin/sh
# A month of a model in service, for cron, CI or Airflow: test, due?, train, gate?, deploy.
#
#   month.sh RUN MODELS TRAIN-COMMAND...
#
# Add the month's data first. TRAIN-COMMAND is `alma train` or `alma images` with --out RUN. MODELS gets a folder for each
# model that was deployed, named by its mega-batch, and the link `deployed` to the one in service.
# A failed or killed month is repeated by the same command, which does again nothing that was done.
# DUE and GATE are options of `alma due` and `alma gate`, such as DUE='--every 3' and GATE='--worth 1% --forget 2%'.
set -eu
run=$1
models=$2
shift 2

# Exit codes 0, 1 and 3 are answers; any other one ends the script.
ask() {
	answer=0
	"$@" || answer=$?
	case $answer in 0 | 1 | 3) ;; *) exit "$answer" ;; esac
}

deploy() { # the model after mega-batch $1
	[ -f "$models/$1/config.json" ] || alma export "$run" --t "$1" --out "$models/$1" # its last file
	ln -sfn "$1" "$models/deployed"
	echo "deployed: $models/$1"
}

newest_model() { # the mega-batch until which it was trained
	ask alma due "$run" --every 1 --json >"$models/due.json"
	python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["model"]["megabatch"])' "$models/due.json"
}

mkdir -p "$models"
if [ -e "$models/deployed" ] || [ -L "$models/deployed" ]; then
	deployed=$(readlink "$models/deployed" || true)
	case $deployed in */* | "") is_model=false ;; *) is_model=true ;; esac
	if [ $is_model = false ] || [ ! -d "$models/$deployed" ]; then
		echo "error: $models/deployed is no link to a model beside it: ln -sfn N $models/deployed" >&2
		exit 2
	fi
	# shellcheck disable=SC2086  # options are words
	ask alma gate "$run" ${GATE:-} >/dev/null # wrong options end here, before anything is spent
fi

if [ -f "$run/results.jsonl" ]; then
	alma test "$run"
	# shellcheck disable=SC2086
	ask alma due "$run" ${DUE:---every 1}
	if [ $answer = 0 ]; then "$@"; fi
else
	"$@"
fi

newest=$(newest_model)
if [ ! -L "$models/deployed" ]; then
	deploy "$newest"
elif [ "$newest" != "$deployed" ] && ! grep -qsx "$newest" "$models/served"; then
	# shellcheck disable=SC2086
	ask alma gate "$run" --deployed "$deployed" ${GATE:-}
	if [ $answer = 0 ]; then deploy "$newest"; fi
fi

# Models that were in service: one that was taken back stays out.
deployed=$(readlink "$models/deployed")
grep -qsx "$deployed" "$models/served" || echo "$deployed" >>"$models/served"
