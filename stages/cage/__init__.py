"""What stands and runs inside of the sandbox: Linux alone, and nothing but the standard library."""
