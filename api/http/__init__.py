"""HTTP itself: keys, limits, bodies, problem documents, idempotency, the OpenAPI page."""
