"""The REST API: queries Temporal and the artifact store, decides nothing, computes little."""
