"""What needs more than one machine, on one that plays several."""
