#!/bin/sh
# Creates and migrates Temporal's two databases; SQL_* say where. Safe to run at every start.
set -eu

for pair in temporal:temporal temporal_visibility:visibility; do
    database=${pair%%:*}
    schema=${pair##*:}
    temporal-sql-tool --database "$database" create-database
    temporal-sql-tool --database "$database" setup-schema --version 0.0
    temporal-sql-tool --database "$database" update-schema \
        --schema-dir "/etc/temporal/schema/postgresql/v12/$schema/versioned"
done
