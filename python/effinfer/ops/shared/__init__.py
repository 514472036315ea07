"""What the operators' pages share: arrays in and out, what arguments mean, planned attention."""
