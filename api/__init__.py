"""The REST API: asks Temporal and the artifact store, decides nothing, computes nothing heavy."""
