"""What else a result could be: ends of its range, noise, sensitivity, steps that nobody measured."""
