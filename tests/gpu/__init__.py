"""What one GPU shows: engine and trainer side by side, by `make gpu`."""
