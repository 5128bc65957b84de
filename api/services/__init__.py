"""What endpoints share: launching, the run object, plans, and access to the store and Temporal."""
