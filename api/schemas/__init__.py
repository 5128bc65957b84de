"""What the API answers with, and the bodies that it reads."""
