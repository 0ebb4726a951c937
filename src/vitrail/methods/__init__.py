"""Methods: a rule and a readout each."""
