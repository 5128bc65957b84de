"""What builds the site and the pages of docs/reference."""
