"""What endpoints share: launching, the run object, plans, and the door to store and Temporal."""
