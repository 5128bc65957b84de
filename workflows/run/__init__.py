"""What a TrainingRun is made of: one class a part of its work."""
