"""flowslot."""
