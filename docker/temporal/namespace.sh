#!/bin/sh
# Creates the namespace if it is missing; what an operator changed about it later is kept.
# Search attributes are registered by the workers when they start.
set -eu

attempt=0
until temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" >/dev/null 2>&1 ||
    temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention "$RETENTION"; do
    attempt=$((attempt + 1))
    if [ "$attempt" -ge 30 ]; then
        echo "namespace $TEMPORAL_NAMESPACE could not be created" >&2
        exit 1
    fi
    sleep 2
done
