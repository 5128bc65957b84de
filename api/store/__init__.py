"""What the API reads of the artifact store."""
