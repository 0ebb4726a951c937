"""What a network is made of and how relevance flows back through it: parts, operations, rules."""
