"""What workflows say to each other, keep over continue-as-new, and ask of activities."""
