"""What everything rests on: the recorded forward pass, the table of operations, rules and targets."""
