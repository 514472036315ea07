"""What the operators' modules share: arrays in and out, what arguments mean, planned attention."""
