"""What the API asks of Temporal, and how it reads a run's history."""
