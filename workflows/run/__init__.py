"""The parts of a TrainingRun: one class for each part of its work."""
