#!/usr/bin/env bash
# Starts a training only if its configuration runs and fits:
#
#   ./guard.sh trl sft --config config.yaml
#   AUTOTUNE_CHECK="--gpu H100-80GB --when-unsure fail" ./guard.sh trl dpo --config config.yaml --max_length 4096
#
# AUTOTUNE_CHECK holds options of `autotune check`. Exit codes: those of the check (1 will not fit, 2 cannot run, 3 too
# close to call or not known), or the training's.
set -euo pipefail
read -d '' -ra options <<< "${AUTOTUNE_CHECK:-}" || true # it ends where there is nothing more to read
autotune check "${options[@]}" -- "$@"
exec "$@"
