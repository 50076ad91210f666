"""What the tests and the data must withstand: planted faults, and kills at random moments."""
