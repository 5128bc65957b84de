"""What every activity needs in its worker process, in any room."""
