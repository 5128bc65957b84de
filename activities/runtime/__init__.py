"""What every activity leans on in its worker process, whatever its room."""
