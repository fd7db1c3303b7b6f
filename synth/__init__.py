"""What it costs: gates, look-up tables, square micrometres and megahertz of every unit, and the figures of record."""
