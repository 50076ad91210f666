"""Floor 5: runs the course, holds it to what it must produce, and writes what is generated."""
